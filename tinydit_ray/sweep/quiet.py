"""Quiet by default: what Ray, MLflow and other libraries print goes to the sweep's log, at the file descriptors,
so that their child processes are covered too. The screen keeps the real terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console


@contextmanager
def quiet_output(log: Path) -> Iterator[Console]:
    """Inside, stdout and stderr go to ``log``; the console yielded writes to the terminal that was stdout."""
    sys.stdout.flush(), sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with open(log, "ab", buffering=0) as file, os.fdopen(os.dup(1), "w", encoding="utf-8") as terminal:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield make_console(terminal)
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            for number, old in zip((1, 2), saved, strict=True):
                os.dup2(old, number)
                os.close(old)


def make_console(file: object = None) -> Console:
    """A console as wide as the terminal; wide enough for the table where there is none (a pipe, CI)."""
    stream = file or sys.stdout
    console = Console(file=stream)  # type: ignore[arg-type]
    return console if console.is_terminal else Console(file=stream, width=150)  # type: ignore[arg-type]
