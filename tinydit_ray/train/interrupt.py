"""Ctrl-C during training: the first one ends after the step at hand, a second one at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOTICE = b"\ninterrupted: finishing this step and writing a checkpoint (once more to leave at once)\n"


class Stop:
    """``asked`` once a signal has come. Inside ``at_once`` a signal raises: nothing there needs finishing."""

    def __init__(self) -> None:
        self.asked, self.patient = False, True

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        self.patient = False
        try:
            yield
        finally:
            self.patient = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self.patient:
            self.asked = True
            raise KeyboardInterrupt
        self.asked = True
        os.write(2, NOTICE)  # print may be what it interrupted
