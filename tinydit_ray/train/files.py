"""The run's folder: who holds it, and its two checkpoints, of which one is always whole.

OUT/metrics.json        configuration, curves, scores, speed; status training, complete or diverged
OUT/samples.png         (and samples_ema.png)  images from fixed noise, at the end
OUT/strip.png           the same noise sampled at several moments of training, one row each
OUT/checkpoint.pt       the last checkpoint;  checkpoint.prev.pt  the one before
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tinydit_ray.atomic import replace_text, replacing
from tinydit_ray.storage import Storage, StorageError
from tinydit_ray.train.options import TrainError
from tinydit_ray.train.trainer import Trainer, load_checkpoint


class RunFolder:
    """A run's folder, held by one process at a time. With a ``storage`` each checkpoint is copied there too, and a
    folder without any (another machine took over) begins with that copy."""

    def __init__(self, path: Path, storage: Storage | None = None) -> None:
        self.path, self.storage = path, storage
        self.current, self.previous = path / "checkpoint.pt", path / "checkpoint.prev.pt"
        self.metrics_path = path / "metrics.json"
        self._lock = FileLock(path / ".lock")

    def __enter__(self) -> RunFolder:
        """Make and lock the folder. Raises TrainError where it cannot be written or is in use."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            for stale in self.path.glob("*.tmp"):  # of a process that was killed while it wrote
                stale.unlink()
        except Timeout:
            raise TrainError(f"--out {self.path}: another process is training there") from None
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TrainError(f"--out {self.path}: cannot be written ({reason})") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def newest(self) -> tuple[Path | None, dict[str, Any], str]:
        """(path, content, note) of the newest whole checkpoint; no path where there is none yet.

        A damaged one is moved aside, so that it never takes the place of the good one before it.
        Raises TrainError where checkpoints exist and none is whole.
        """
        if self.storage and not self.current.exists() and not self.previous.exists():
            self._fetch(self.storage)
        found = [path for path in (self.current, self.previous) if path.exists()]
        problems: list[str] = []
        for path in found:
            state, problem = _read(path)
            if state is not None:
                return path, state, self._note(path, problems)
            problems.append(f"{path.name} is damaged ({problem})")
        if problems:
            raise TrainError(f"{self.path}: {'; '.join(problems)}; remove them, or choose another --out")
        return None, {}, ""

    def _fetch(self, storage: Storage) -> None:
        try:
            content = storage.find(self.stored_name)
        except StorageError as error:
            raise TrainError(f"--storage {storage.uri}: {error}") from None
        if content is not None:
            with replacing(self.current) as temporary:
                temporary.write_bytes(content)

    @property
    def stored_name(self) -> str:
        return f"{self.path.absolute().name}/{self.current.name}"

    def _copy(self, storage: Storage) -> None:
        try:
            storage.write(self.stored_name, self.current.read_bytes())
        except StorageError as error:
            raise TrainError(f"--storage {storage.uri}: {error}; the checkpoint in {self.path} is whole") from None

    def _note(self, path: Path, problems: list[str]) -> str:
        if path == self.current:
            return ""
        if problems:
            os.replace(self.current, self.path / "checkpoint.damaged.pt")
        reason = problems[0] if problems else f"{self.current.name} is missing"
        return f"{reason}; falling back to {path.name}, the one before"

    def save(self, trainer: Trainer, config: Any, **extra: Any) -> None:
        """A new checkpoint; the last one becomes the previous one. A kill at any moment leaves a whole one."""
        new = self.path / "checkpoint.new.tmp"
        try:
            trainer.save(new, config=config, **extra)
            if self.current.exists():
                os.replace(self.current, self.previous)
            os.replace(new, self.current)
        except (OSError, RuntimeError) as error:  # torch's zip writer reports a full disk as RuntimeError
            new.unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or f"disk full? {str(error).strip().splitlines()[0]}"
            raise TrainError(f"{self.current}: not written ({reason}); the one before it is kept") from error

        if self.storage:
            self._copy(self.storage)

    def read_metrics(self) -> dict[str, Any]:
        try:
            content = json.loads(self.metrics_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        """Whole or not at all."""
        replace_text(self.metrics_path, json.dumps(metrics, indent=1, allow_nan=False) + "\n")


def _read(path: Path) -> tuple[dict[str, Any] | None, str]:
    """A checkpoint's content, or what is wrong with the file; torch.load itself does not check the checksums."""
    try:
        with zipfile.ZipFile(path) as file:
            broken = file.testzip()
        if broken is not None:
            return None, f"{broken} has a wrong checksum"
        return load_checkpoint(path), ""
    except Exception as error:  # whatever a damaged file makes the readers raise
        return None, (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
