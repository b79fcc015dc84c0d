"""What a sweep works with while it runs: MLflow's runs, and an executor of its rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tinydit_ray.config import CellConfig
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.folder import SweepFolder
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.prepare import check_ray, resolve_device
from tinydit_ray.sweep.queue import EarlyStop, Executor
from tinydit_ray.tracking import NullTracker, Tracker, TrackingError

if TYPE_CHECKING:
    from tinydit_ray.distributed.cluster import RayCluster


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


@contextmanager
def joined(options: SweepOptions, console: Console) -> Iterator[RayCluster | None]:
    """The cluster at ``--address``, left at the end; None where the sweep runs on this machine."""
    if not options.address:
        yield None
        return
    if not options.ray:
        raise UsageError(f"--address {options.address} and --no-ray: a cluster is a cluster of Ray")
    check_ray()
    from tinydit_ray.distributed.cluster import RayCluster

    cluster = RayCluster(options.address, resolve_device(options, console), options.wait_nodes_s)
    try:
        yield cluster
    finally:
        cluster.close()


def make_executor(
    options: SweepOptions, cells: Iterable[CellConfig], kind: str, early_stop: EarlyStop | None = None,
    cluster: RayCluster | None = None,
) -> Executor:  # fmt: skip
    if not options.ray:
        from tinydit_ray.sweep.local import LocalExecutor

        return LocalExecutor()
    from tinydit_ray.distributed import RayExecutor

    return RayExecutor(
        concurrent=options.concurrent, cells=list(cells), kind=kind, early_stop=early_stop, cluster=cluster
    )
