"""The sweep folder: everything a sweep leaves behind, and enough to repeat it.

NAME/sweep.json       resolved grid, machine, versions, commit, data, command
NAME/records.jsonl    one row per cell, round and attempt, appended the moment it ends
NAME/results.parquet  one row per cell and round, with the pooled numbers
NAME/summary.txt      the table as printed
NAME/cells/CELL/rN-aM/  log.txt, steps.json (raw step times), loss.csv, phases.json, record.json
NAME/logs/            driver.log: the chatter of Ray, MLflow and libraries
NAME/compile_cache/   Inductor's, of this sweep alone
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tinydit_ray.record import Record, append_record, read_records
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.plan import Round
from tinydit_ray.tracking import round_name

MAX_NAME = 120


class SweepFolder:
    """One sweep's folder, held by one driver at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.records_path = self.path / "records.jsonl"
        self.logs = self.path / "logs"
        self.compile_cache = self.path / "compile_cache"
        self._lock = FileLock(self.path / ".lock")

    @classmethod
    def open(cls, out: Path, name: str, *, resume: bool) -> SweepFolder:
        """Make the folder, or take up the one of a sweep to resume. Raises UsageError."""
        check_name(name)
        folder = cls(out.expanduser() / name)
        exists = (folder.path / "sweep.json").exists()
        if resume and not exists:
            raise UsageError(f"--resume {name}: there is no sweep in {folder.path}")
        if exists and not resume:
            raise UsageError(f"--name {name}: {folder.path} holds a sweep already; go on with it by --resume {name}")
        if not exists and folder.path.is_dir() and any(folder.path.iterdir()):
            raise UsageError(f"--name {name}: {folder.path} holds other files")
        try:
            for path in (folder.path, folder.logs, folder.path / "cells", folder.compile_cache):
                path.mkdir(parents=True, exist_ok=True)
            folder._lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(f"{folder.path}: another process runs this sweep right now") from None
        except OSError as error:
            raise UsageError(f"--out {out}: {folder.path} cannot be written ({error.strerror})") from None
        return folder

    def close(self) -> None:
        self._lock.release()

    def discard(self) -> None:
        """Remove the folder of a sweep that never began; one with a record stays."""
        if not self.records_path.exists():
            shutil.rmtree(self.path, ignore_errors=True)

    def write_sweep(self, content: dict[str, Any]) -> None:
        replace_text(self.path / "sweep.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def read_sweep(self) -> dict[str, Any]:
        return json.loads((self.path / "sweep.json").read_text(encoding="utf-8"))

    def records(self) -> list[Record]:
        return read_records(self.records_path)

    def append(self, record: Record) -> None:
        append_record(self.records_path, record)

    def round_folder(self, item: Round, attempt: int) -> Path:
        key = {"repeat": item.cell.repeat, "round": item.number, "attempt": attempt}
        return self.path / "cells" / item.cell.slug / round_name(key)


def check_name(name: str) -> None:
    """A sweep's name is one folder name. Raises UsageError."""
    plain = re.fullmatch(r"[^/\\\x00-\x1f]+", name) and not name.startswith(".")
    if not plain or len(name.encode()) > MAX_NAME:
        raise UsageError(
            f"--name {name[:40]!r}: must be a plain folder name of at most {MAX_NAME} bytes, without slashes,"
            " not starting with a dot"
        )


def default_name(grid_name: str) -> str:
    clean = re.sub(r"[^\w.-]+", "-", grid_name)[:60]
    return f"{clean}-{datetime.now():%Y%m%d-%H%M%S}"


def replace_text(path: Path, text: str) -> None:
    """Write beside, then rename: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def git_commit() -> str:
    """Commit of the checkout this product runs from, with ``+dirty`` where files differ; "" outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    return commit + ("+dirty" if commit and _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
