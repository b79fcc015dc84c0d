"""A disk that can be full: a tmpfs of a few MB, where this process may mount one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path | None]:
    """The mounted folder; None where none can be mounted."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
    root = sys.platform == "linux" and os.geteuid() == 0
    if not root or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def mounted(disk: Path | None) -> Path:
    """The disk, or the end of a test that needs one."""
    if disk is None:
        pytest.skip("no small file system can be mounted here: that takes Linux and root")
    return disk


def fill(path: Path) -> Path:
    """Write a file until nothing more fits."""
    filler = path / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass
    return filler
