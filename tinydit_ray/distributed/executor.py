"""Tune schedules the rounds of a sweep; every trial is a fresh process that holds its CPUs and GPU.

A searcher hands out the rounds one by one, so that the sweep decides at the last moment what runs
next (a cell that turned out unsupported costs no further trial). A callback in the driver takes each
record the moment its trial reports it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tinydit_ray.config import CellConfig
from tinydit_ray.distributed.resources import DRIVER_RESOURCE
from tinydit_ray.sweep.errors import ExecutorLost, UsageError
from tinydit_ray.sweep.queue import EarlyStop, Queue

if TYPE_CHECKING:
    from tinydit_ray.distributed.search import RoundSearcher

ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # workers run at nice 15 otherwise, and a timing would be of that
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_process_group_cleanup_enabled": "1",  # a trial that dies takes along what it started: compilers, loaders
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the record is the result; nothing reads Tune's own files
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is the driver's to handle: it keeps what is done and ends
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",  # of worker groups; each check wakes every worker once
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "150",  # loaded machines import torch slowly
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RayExecutor:
    """Runs a sweep's rounds as Tune trials on a Ray of its own, or on the cluster at ``address``.

    ``documented`` runs them in the pattern of Ray's documentation, for comparison; ``early_stop`` ends trials that
    are behind, where trials report scores along the way. Raises UsageError where
    the cluster can never give a trial what it asks for: such a trial would wait for ever.
    """

    reuse_actors = False  # a fresh process per trial

    def __init__(
        self, *, cells: Sequence[CellConfig], address: str | None = None, concurrent: int = 1,
        documented: bool = False, early_stop: EarlyStop | None = None,
    ) -> None:  # fmt: skip
        import ray

        self.concurrent, self.documented, self.early_stop = concurrent, documented, early_stop
        self.name = "ray, worker group" if documented else "ray"
        self.started = not ray.is_initialized()
        self.driven = any(c.workers > 1 for c in cells)
        needs = max((c.cpus_per_worker * c.workers for c in cells), default=1)
        gpus = max((c.gpus_per_worker * c.workers for c in cells), default=0)
        with _environment(ENVIRONMENT):
            if self.started:
                _start(address, cpus=None if address else max(needs, os.cpu_count() or 1))
        self._check(needs, gpus)

    def _check(self, cpus: int, gpus: int) -> None:
        import ray

        have, later = ray.cluster_resources(), most_resources()
        for name, asked in (("CPU", cpus), ("GPU", gpus), (DRIVER_RESOURCE, int(self.driven))):
            if asked > max(have.get(name, 0), later.get(name, 0)):
                self.close()
                in_all = f"{have.get(name, 0):g} in all" + (f", at most {later[name]:g}" if name in later else "")
                raise UsageError(f"a trial asks for {asked} {name}, the cluster has {in_all}")

    def trainable(self) -> Callable[[dict[str, Any]], None]:
        """What a trial runs."""
        from tinydit_ray.distributed.trial import tune_trial, tune_trial_documented

        return tune_trial_documented if self.documented else tune_trial

    def run(self, queue: Queue) -> None:
        from ray import tune

        from tinydit_ray.distributed.search import RecordCallback, RoundSearcher, cell_resources, driver_resources
        from tinydit_ray.distributed.stopping import asha
        from tinydit_ray.distributed.watch import RayWatch

        watch, searcher = RayWatch(queue.lost), RoundSearcher(queue, self.early_stop)
        resources = driver_resources if self.documented else cell_resources
        with _environment(ENVIRONMENT), tempfile.TemporaryDirectory(prefix="tinydit-tune-") as storage:
            tuner = tune.Tuner(
                tune.with_resources(self.trainable(), resources),
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    scheduler=asha(self.early_stop) if self.early_stop else None,
                    num_samples=-1,
                    max_concurrent_trials=self.concurrent,
                    reuse_actors=self.reuse_actors,
                    trial_dirname_creator=lambda trial: trial.trial_id,
                ),
                run_config=tune.RunConfig(
                    name="sweep",
                    storage_path=storage,
                    verbose=0,
                    callbacks=[RecordCallback(searcher, watch.check)],
                    failure_config=tune.FailureConfig(max_failures=0),
                    checkpoint_config=tune.CheckpointConfig(),
                ),
            )
            with watch:
                _fit(tuner, searcher)

    def close(self) -> None:
        """Shut down the Ray that this executor started; a cluster it joined stays."""
        import ray

        if self.started and ray.is_initialized():
            ray.shutdown()


def most_resources() -> dict[str, int]:
    """What a cluster that autoscales may grow to; empty for one that does not. Ray has no public call for it."""
    from ray._private.state import state

    return state.get_max_resources_from_cluster_config() or {}


def _fit(tuner: Any, searcher: RoundSearcher) -> None:
    """Run all trials. What the queue raised inside Tune comes out as it was; Tune itself would raise the text of its
    traceback, or go on. Raises ExecutorLost where Ray is gone."""
    try:
        tuner.fit()
    except ExecutorLost:
        raise
    except Exception as error:
        if searcher.failure is None:
            traceback.print_exc()  # into the driver's log
            raise ExecutorLost(f"Ray has ended the sweep ({first_line(error)})") from None
    if searcher.failure is not None:
        raise searcher.failure


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _start(address: str | None, cpus: int | None) -> None:
    import ray

    how: dict[str, Any] = (
        {"address": address}
        if address
        # "local": without it Ray looks for one that somebody else runs on this machine
        else {
            "address": "local",
            "num_cpus": cpus,
            "include_dashboard": False,
            "resources": {DRIVER_RESOURCE: 1000},
        }
    )
    try:
        ray.init(
            **how,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
            runtime_env={"env_vars": _trial_environment()},
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"--address {address}" if address else "Ray"
        raise UsageError(f"{where}: cannot be reached or started ({str(error).splitlines()[0]})") from None


def _trial_environment() -> dict[str, str]:
    """What trials inherit: where the data and its cache lie; Ray sets the threads unless they are set."""
    names = ("TINYDIT_DATA", "TINYDIT_CACHE", "CXX", "PYTHONPATH")
    return {name: os.environ[name] for name in names if name in os.environ} | ENVIRONMENT


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
