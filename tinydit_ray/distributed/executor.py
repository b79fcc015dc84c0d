"""Tune schedules the rounds of a sweep; every trial is a fresh process that holds its CPUs and GPU.

A searcher hands out the rounds one by one, each to a node that is free, so that the sweep decides at the last
moment what runs next (a cell that turned out unsupported costs no further trial). A callback in the driver takes each
record the moment its trial reports it.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tinydit_ray.config import CellConfig
from tinydit_ray.distributed.resources import DRIVER_RESOURCE
from tinydit_ray.distributed.start import ENVIRONMENT, environment, start
from tinydit_ray.sweep.errors import ExecutorLost, UsageError
from tinydit_ray.sweep.placement import Node, Placement
from tinydit_ray.sweep.queue import EarlyStop, Queue

if TYPE_CHECKING:
    from tinydit_ray.distributed.cluster import RayCluster
    from tinydit_ray.distributed.search import RoundSearcher


class RayExecutor:
    """Runs a sweep's rounds as Tune trials on the ``cluster``, or on a Ray of its own.

    ``concurrent`` is None for one trial per node, else as in ``Placement``. ``documented`` runs them in the pattern of
    Ray's documentation, for comparison; ``early_stop`` ends trials that are behind, where trials report scores along
    the way. Raises UsageError where a trial can never have what it asks for: it would wait for ever.
    """

    reuse_actors = False  # a fresh process per trial

    def __init__(
        self, *, cells: Sequence[CellConfig], kind: str = "", concurrent: int | str | None = None,
        documented: bool = False, early_stop: EarlyStop | None = None, cluster: RayCluster | None = None,
    ) -> None:  # fmt: skip
        import ray

        self.documented, self.early_stop, self.cluster = documented, early_stop, cluster
        self.name = "ray, worker group" if documented else "ray"
        self.started = cluster is None and not ray.is_initialized()
        self.driven = any(c.workers > 1 for c in cells)
        needs = max((c.cpus_per_worker * c.workers for c in cells), default=1)
        gpus = max((c.gpus_per_worker * c.workers for c in cells), default=0)
        if self.started:
            with environment(ENVIRONMENT):
                start(None, cpus=max(needs, os.cpu_count() or 1))
        self._check(needs, gpus)
        here = Node("", ray.util.get_node_ip_address(), kind, int(self.have("CPU")), int(self.have("GPU")))
        # without a cluster there is one machine, and one trial at a time unless a number says otherwise
        self.placement = Placement(cluster.nodes.alive() if cluster else [here], concurrent)

    def have(self, name: str) -> float:
        import ray

        return ray.cluster_resources().get(name, 0.0)

    def _check(self, cpus: int, gpus: int) -> None:
        asked = {DRIVER_RESOURCE: int(self.driven)} | ({} if self.cluster else {"CPU": cpus, "GPU": gpus})
        for name, number in asked.items():
            if number > (have := self.have(name)):
                self.close()
                raise UsageError(f"a trial asks for {number} {name}, the cluster has {have:g} in all")

    def trainable(self) -> Callable[[dict[str, Any]], None]:
        """What a trial runs."""
        from tinydit_ray.distributed.trial import tune_trial, tune_trial_documented

        return tune_trial_documented if self.documented else tune_trial

    def run(self, queue: Queue) -> None:
        from ray import tune

        from tinydit_ray.distributed.search import RecordCallback, RoundSearcher, cell_resources, driver_resources
        from tinydit_ray.distributed.stopping import scheduler
        from tinydit_ray.distributed.watch import RayWatch

        watch = RayWatch(queue.executor_lost)
        searcher = RoundSearcher(queue, self.placement, self.cluster, self.early_stop)
        resources = driver_resources if self.documented else cell_resources
        with environment(ENVIRONMENT), tempfile.TemporaryDirectory(prefix="tinydit-tune-") as storage:
            tuner = tune.Tuner(
                tune.with_resources(self.trainable(), resources),
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    scheduler=scheduler(searcher, self.early_stop),
                    num_samples=-1,
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
