r"""What a person is shown: text that others have written, without what a terminal obeys or nobody sees.

Names in a store, a file or a folder may hold sequences that clear a screen, set its title, or turn the direction of
writing. All that the commands print goes through one function: such a letter is written as its number, `\x1b`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment

_NOT_SHOWN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Control characters, those that turn the direction of writing, halves of letters, separators of lines."""
_UNSEEN = (
    "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff"
)
"""Letters and marks, by their category, that have no picture."""
_unseen = re.compile(f"[{_UNSEEN}]")


def printable(text: str, *, lines: bool = False) -> str:
    r"""Text that can be shown: what a terminal would obey, or what nobody would see, is written as its number.

    Args:
        text: anything; that which is printable stays as it is.
        lines: leave the ends of lines, and tabs.

    >>> print(printable("a\x1b[2Jb\u202e\n"))
    a\x1b[2Jb\u202e\n

    """
    if text.isprintable() and not _unseen.search(text):
        return text
    return "".join(letter if lines and letter in "\n\t" else _shown(letter) for letter in text)


@lru_cache(maxsize=4096)
def _shown(letter: str) -> str:
    if unicodedata.category(letter) not in _NOT_SHOWN and not _unseen.match(letter):
        return letter
    if letter in _SHORT:
        return _SHORT[letter]
    number = ord(letter)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def printable_json(text: str) -> str:
    r"""JSON of the same content, in which the letters that `printable` changes are escaped as JSON does it.

    >>> print(printable_json('["\x9b\u202eä"]'))
    ["\u009b\u202eä"]
    """
    if text.isprintable() and not _unseen.search(text):
        return text
    return "".join(each if each == "\n" or _shown(each) == each else json.dumps(each)[1:-1] for each in text)


class Screen(Console):
    """A console on which every text is printable, wherever in a table or a bar it stands."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As a console does, letter by letter harmless; what moves the cursor comes from the console alone."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text, lines=True))


def as_markup(value: object, *, lines: bool = False) -> str:
    """A value that somebody else has written, as markup for a console; one line, unless `lines` may stay."""
    return escape(printable(str(value), lines=lines))
