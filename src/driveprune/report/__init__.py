"""Reports: what runs gave, as tables, figures and a page. Stores are only read; nothing named in them is imported."""
