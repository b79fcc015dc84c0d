"""Files that are there whole or not at all: written beside, flushed to the disk, renamed (man 2 rename).

Whatever ends the writer, and whenever, a reader finds the old file or the new one. Knows nothing of the
rest of the project.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; when the block ends, that file takes the place of ``path``.

    If the block raises, or the disk is full, ``path`` stays as it was and nothing is left beside it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)  # the new name; without it a power cut may bring the old file back
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def remove_stale(path: Path) -> None:
    """Remove what killed processes left beside ``path``. Only for who holds the lock under which it is written."""
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        stale.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
