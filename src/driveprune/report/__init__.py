"""Reports: what runs gave, as tables. Reads stores; never trains, never imports what is named in them."""
