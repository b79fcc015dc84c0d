"""The sweep folder: everything a sweep leaves behind, and enough to repeat it.

NAME/sweep.json       resolved grid, machine, versions, commit, data, command
NAME/records.jsonl    one row per cell, round and attempt, appended the moment it ends
NAME/results.parquet  one row per cell and round, with the pooled numbers
NAME/summary.txt      the table as printed
NAME/best.yaml        the fastest cell at equal quality, for python -m tinydit_ray.train --profile
NAME/cells/CELL/rN-aM/  log.txt, steps.json (raw step times), loss.csv, phases.json, record.json
NAME/logs/            driver.log: the chatter of Ray, MLflow and libraries
NAME/compile_cache/   Inductor's, of this sweep alone
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tinydit_ray.atomic import replace_text
from tinydit_ray.record import Record, append_record, read_records
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.plan import Round
from tinydit_ray.tracking import mask, round_name

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
        check_name(name, "--resume" if resume else "--name")
        folder = cls(out.expanduser() / name)
        folder._check(name, resume=resume)
        if not resume and folder.path.is_dir() and not folder._is_taken() and any(folder.path.iterdir()):
            raise UsageError(f"--name {name}: {folder.path} holds other files")
        try:
            for path in (folder.path, folder.logs, folder.path / "cells", folder.compile_cache):
                path.mkdir(parents=True, exist_ok=True)
            folder._lock.acquire(timeout=0)
            folder._check(name, resume=resume)  # once more: another process may have been between the two
        except Timeout:
            raise UsageError(f"{folder.path}: another process runs this sweep right now") from None
        except OSError as error:
            raise UsageError(f"--out {out}: {folder.path} cannot be written ({error.strerror})") from None
        return folder

    def _check(self, name: str, *, resume: bool) -> None:
        exists = (self.path / "sweep.json").exists()
        if resume and not exists:
            raise UsageError(f"--resume {name}: there is no sweep in {self.path}")
        if exists and not resume:
            raise UsageError(f"--name {name}: {self.path} holds a sweep already; go on with it by --resume {name}")

    def _is_taken(self) -> bool:
        """Whether another process holds this folder, and has not written ``sweep.json`` yet."""
        return (self.path / ".lock").exists()

    def close(self) -> None:
        self._lock.release()

    def discard(self) -> None:
        """Remove the folder of a sweep that never began; one with a record stays."""
        if not self.records_path.exists():
            shutil.rmtree(self.path, ignore_errors=True)

    def write_sweep(self, content: dict[str, Any]) -> None:
        """Passwords in URIs are masked."""
        replace_text(self.path / "sweep.json", json.dumps(mask(content), indent=2, ensure_ascii=False) + "\n")

    def read_sweep(self) -> dict[str, Any]:
        """Raises UsageError where the file was damaged."""
        try:
            content = json.loads((self.path / "sweep.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or not {"sweep_id", "created_at"} <= content.keys():
            raise UsageError(f"--resume {self.path.name}: {self.path / 'sweep.json'} is damaged")
        return content

    def records(self) -> list[Record]:
        return read_records(self.records_path)

    def append(self, record: Record) -> None:
        append_record(self.records_path, record)

    def round_folder(self, item: Round, attempt: int) -> Path:
        key = {"repeat": item.cell.repeat, "round": item.number, "attempt": attempt}
        return self.path / "cells" / item.cell.slug / round_name(key)


def check_name(name: str, option: str = "--name") -> None:
    """A sweep's name is one folder name. Raises UsageError."""
    plain = re.fullmatch(r"[^/\\\x00-\x1f]+", name) and not name.startswith(".")
    if not plain or len(name.encode()) > MAX_NAME:
        raise UsageError(
            f"{option} {name[:40]!r}: must be a plain folder name of at most {MAX_NAME} bytes, without slashes,"
            " not starting with a dot"
        )


def default_name(grid_name: str) -> str:
    clean = re.sub(r"[^\w.-]+", "-", grid_name)[:60]
    return f"{clean}-{datetime.now():%Y%m%d-%H%M%S}"


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
