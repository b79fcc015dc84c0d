"""Small things a tracker needs to be careful: one writer per sweep, and telling why a call failed."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from tinydit_ray.tracking.uri import TrackingError

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOCK_NAME = ".tracking.lock"


def hold(sweep_dir: Path) -> FileLock:
    """One process at a time writes a sweep's runs; a killed one lets go by itself."""
    lock = FileLock(sweep_dir / LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise TrackingError(
            f"{sweep_dir}: another process tracks this sweep right now; it sends what is missing when it ends"
        ) from error
    except OSError as error:
        raise TrackingError(f"{sweep_dir}: {error.strerror or error}") from error
    return lock


def is_there(client: MlflowClient, experiment_id: str, error: Exception) -> bool:
    """Whether MLflow is there after this error, so that only one record is in question.

    A locked store and a silent server are not asked again: that would wait as long once more.
    """
    if getattr(error, "error_code", "") == "TEMPORARILY_UNAVAILABLE":
        return False
    if any(type(cause).__name__.endswith("Timeout") for cause in _chain(error)):
        return False
    try:
        client.get_experiment(experiment_id)
    except Exception:
        return False
    return True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
