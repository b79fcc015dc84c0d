"""Ctrl-C and SIGTERM during a sweep: the first ends it after what is being written, a second one at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tinydit_ray.sweep.errors import INTERRUPTED

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\ninterrupted: writing what is done (once more to leave at once)\n"


class Interrupts:
    """Turns the first signal into a KeyboardInterrupt, but never inside ``shield``; a second one ends the process.

    The second one needs no clean-up: records are flushed as they come, files are replaced whole, locks go with
    the process, and trials end with their parent.
    """

    def __init__(self) -> None:
        self.asked = False
        self._shields, self._waiting = 0, False
        self._terminal = -1

    @contextmanager
    def listening(self) -> Iterator[Interrupts]:
        """Handle the signals inside; in a thread that is not the main one they stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        self._terminal = os.dup(2)  # what is stderr later may be the sweep's log
        self.install()
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._terminal)

    def install(self) -> None:
        """Take the signals; once more after ``ray.init``, which sets a handler of its own."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._on_signal)

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Inside, a signal waits until the block has ended."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if self._waiting and not self._shields:
            self._waiting = False
            raise KeyboardInterrupt

    def say(self, text: str) -> None:
        """To the terminal, whatever stderr is by now."""
        if self._terminal >= 0:
            os.write(self._terminal, text.encode())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(INTERRUPTED)
        self.asked = True
        os.write(self._terminal, NOTICE)
        if self._shields:
            self._waiting = True
        else:
            raise KeyboardInterrupt
