"""What a sweep works with while it runs: MLflow's runs, and an executor of its rounds."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from tinydit_ray.config import CellConfig
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.folder import SweepFolder
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.queue import EarlyStop, Executor
from tinydit_ray.tracking import NullTracker, Tracker, TrackingError


def open_tracker(options: SweepOptions, content: dict[str, Any], folder: SweepFolder) -> Tracker | NullTracker:
    """MLflow, opened before any trial. ``--no-ray`` does without where it is not installed."""
    if not options.ray and find_spec("mlflow") is None and options.tracking_uri is None:
        return NullTracker()
    try:
        tracker = Tracker.open(
            uri=options.tracking_uri, experiment=options.experiment, sweep=content, sweep_dir=folder.path
        )
    except TrackingError as error:
        raise UsageError(f"--tracking-uri: {error}") from None
    content["tracking"] = {"uri": tracker.uri, "experiment": options.experiment, "run_id": tracker.run_id}
    return tracker


def make_executor(
    options: SweepOptions, cells: Iterable[CellConfig], early_stop: EarlyStop | None = None
) -> Executor:
    if not options.ray:
        from tinydit_ray.sweep.local import LocalExecutor

        return LocalExecutor()
    from tinydit_ray.distributed import RayExecutor

    return RayExecutor(address=options.address, concurrent=options.concurrent, cells=list(cells), early_stop=early_stop)
