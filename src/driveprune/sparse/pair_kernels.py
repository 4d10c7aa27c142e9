"""What is between two layers in a row: some rows of the first one's output, where the second one reads them.

The scratch has zeros around the rows. It is a ring, in which each new row takes the place of the oldest one; or it
moves on by some rows at a time, of which those that are needed again go to the top.
"""

from __future__ import annotations

from driveprune.compiled import compiled
from driveprune.sparse.code import LANES
from driveprune.sparse.tiling import SIZES
from driveprune.sparse.vector import clear_vector, copy_row

_INPUTS, _WIDTH, _ROWS, _COLUMNS, _LEFT, _ROW_PITCH, _CHANNEL_PITCH = (
    SIZES[name] for name in ("inputs", "width", "rows", "columns", "left", "row_pitch", "channel_pitch")
)


@compiled()
def row_of(number, rows, advance):
    """Which of the scratch's rows the one with a number is in: it is full after `rows`, then goes back by some."""
    return number - max(0, (number - rows + advance) // advance) * advance


@compiled()
def clear_sides(scratch, sizes):
    """Zeros left and right of the image, in all rows."""
    left, right, columns = sizes[_LEFT], sizes[_LEFT] + sizes[_WIDTH], sizes[_COLUMNS]
    for c in range(sizes[_INPUTS]):
        for r in range(sizes[_ROWS]):
            begin = c * sizes[_CHANNEL_PITCH] + r * sizes[_ROW_PITCH]
            for q in range(left):
                clear_vector(scratch, begin + q * LANES)
            for q in range(right, columns):
                clear_vector(scratch, begin + q * LANES)


@compiled()
def clear_row(scratch, sizes, row):
    """Zeros in one row of all channels."""
    for c in range(sizes[_INPUTS]):
        begin = c * sizes[_CHANNEL_PITCH] + row * sizes[_ROW_PITCH]
        for q in range(sizes[_COLUMNS]):
            clear_vector(scratch, begin + q * LANES)


@compiled()
def move_on(scratch, sizes, advance):
    """Forget the first rows of all channels; the others go to the top. Nothing moves in a ring."""
    gone = advance * sizes[_ROW_PITCH]
    kept = (sizes[_ROWS] * sizes[_ROW_PITCH] - gone) // LANES
    for c in range(sizes[_INPUTS]):
        begin = c * sizes[_CHANNEL_PITCH]
        copy_row(scratch, begin, scratch, begin + gone, kept, sizes[_CHANNEL_PITCH])
