"""Signals that ask a process to stop: Ctrl-C, SIGTERM, and SIGHUP when a terminal closes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
AGAIN = 1.0
"""Seconds after the first signal in which others count as the same one: torchrun may pass on what a terminal sent."""


class Asked:
    """Whether a signal has asked to stop; called, it says so."""

    def __init__(self, said: str) -> None:
        self._said, self._at = said, 0.0
        self.signal = 0

    def __call__(self) -> bool:
        """Whether it was."""
        return self.signal != 0

    @property
    def code(self) -> int:
        """The exit code of a process that this signal has ended, or Ctrl-C if there was none."""
        return 128 + (self.signal or signal.SIGINT)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._at = number, time.monotonic()
            _say(self._said)
        elif time.monotonic() - self._at > AGAIN:
            _say("\x1b[?25h" if sys.stderr.isatty() else "")  # a bar has hidden the cursor
            os._exit(128 + number)


def _say(text: str) -> None:
    with suppress(OSError):  # not by print: the signal may have come while that was at work
        os.write(2, text.encode())


@contextmanager
def asked(said: str = "") -> Iterator[Asked]:
    """Have signals ask to stop meanwhile, instead of ending the process; a second one ends it at once.

    What ignores a signal goes on to ignore it, as `nohup` wants it.

    Args:
        said: what is said on stderr when it comes.

    """
    found, before = Asked(said), {}
    if threading.current_thread() is threading.main_thread():  # no other one can
        for name in _NAMES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, found._receive)
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
