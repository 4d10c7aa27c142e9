"""Places in one piece of memory, which are used again when nobody needs them any more."""

from __future__ import annotations

from driveprune.sparse.code import LINE


class Arena:
    """Hands out places, in whole lines of the cache."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        """Numbers that it holds so far."""
        self._gaps: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        """A place for so many numbers: the smallest gap that they fit into, or the end."""
        length = -(-size // LINE) * LINE
        fitting = [gap for gap in self._gaps if gap[1] >= length]
        if not fitting:
            return self.add(size)
        place, room = min(fitting, key=lambda gap: gap[1])
        self._gaps.remove((place, room))
        if room > length:
            self._gaps.append((place + length, room - length))
        return place

    def add(self, size: int) -> int:
        """A place at the end, which nobody had before."""
        place = -(-self.size // LINE) * LINE
        self.size = place + -(-size // LINE) * LINE
        return place

    def give_back(self, place: int, size: int) -> None:
        """Others may have a place from now on."""
        self._gaps.append((place, -(-size // LINE) * LINE))
