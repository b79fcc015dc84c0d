"""A cell of several workers: a Ray Train worker group, and what becomes of it where one of them fails."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from typing import Any

from tinydit_ray.cell import CellTask, rank_of, run_cell
from tinydit_ray.process import thread_environment
from tinydit_ray.record import RESTARTED_FLAG, Record
from tinydit_ray.sweep.local import lost_partner, lost_record, worst

START_FAILURES = 1  # a group that does not start is tried once more, then the round has failed


class RankFailed(RuntimeError):
    """A worker's cell is not ok; the message is its record. It ends the group: the others wait for this one."""


def run_together(task: CellTask, nodes: list[str], starts: int = 1) -> dict[str, Any]:
    """Run a cell in a worker group on these nodes (none: anywhere); returns what the trial reports, whatever it is.
    ``starts`` counts groups: ``task.max_failures`` more are started where workers die."""
    from ray.train import WorkerGroupError
    from ray.train.v2.api.exceptions import TrainingFailedError

    from tinydit_ray.distributed.nodes import nodes_stay

    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="tinydit-train-") as storage:
            return _fit_group(task, nodes, storage)
    except WorkerGroupError as error:
        seconds = time.monotonic() - start
        again = _once_more(task, error.worker_failures, seconds) if starts <= task.max_failures else None
        if again is not None and nodes_stay(nodes):
            return run_together(again, nodes, starts + 1)
        record, text = _failed_record(task, error.worker_failures, seconds), str(error)
    except TrainingFailedError as error:
        cause = getattr(error, "controller_failure", error)
        record, text = lost_record(task, None, time.monotonic() - start, _first_line(cause)), str(error)
    return {"record": json.dumps(record, ensure_ascii=False), "files": {"error.txt": text.encode()}}


def _once_more(task: CellTask, failures: dict[int, Exception], seconds: float) -> CellTask | None:
    """The task for one more start, in the time that is left; None where it is not to have one. A worker that ends with
    a record of what went wrong would end so again."""
    told, _ = _told_and_died(failures)
    left_s = task.timeout_s - seconds if task.timeout_s else 0.0
    if left_s < 0 or (told and not lost_partner(worst(told))):
        return None
    flags = dict.fromkeys([*filter(None, task.flags.split(",")), RESTARTED_FLAG])
    return dataclasses.replace(task, flags=",".join(flags), timeout_s=left_s)


def _fit_group(task: CellTask, nodes: list[str], storage: str) -> dict[str, Any]:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.config import FailureConfig, RunConfig  # what ray.train has under these names at run time

    from tinydit_ray.distributed.nodes import selector
    from tinydit_ray.train.group import COLLECTIVE_TIMEOUT_S, backend_of

    cell = task.cell
    resources: dict[str, float] = {"CPU": cell.cpus_per_worker}
    if cell.gpus_per_worker:
        resources["GPU"] = cell.gpus_per_worker
    run: Any = RunConfig(
        storage_path=storage, name="cell",
        # threads are read when torch is imported, which Train does before it calls our code
        worker_runtime_env={"env_vars": thread_environment(cell.cpus_per_worker)},
        failure_config=FailureConfig(max_failures=0, controller_failure_limit=START_FAILURES),
    )  # fmt: skip
    result: Any = TorchTrainer(
        train_worker,  # type: ignore[arg-type]  # what rank 0 returns becomes result.return_value
        train_loop_config={"task": task.to_json(), "nodes": nodes},
        torch_config=TorchConfig(backend=backend_of(cell.device), timeout_s=int(COLLECTIVE_TIMEOUT_S)),
        scaling_config=ScalingConfig(  # type: ignore[call-arg]  # of V2 at run time, which has selectors
            num_workers=cell.workers, use_gpu=cell.gpus_per_worker > 0, resources_per_worker=resources,
            label_selector=selector(nodes) if nodes else None,
        ),
        run_config=run,
    ).fit()
    return result.return_value


def train_worker(config: dict[str, Any]) -> Any:
    """What each worker of the group runs."""
    from tinydit_ray.distributed.trial import here, report_of

    task = CellTask.from_json(config["task"])
    record = run_cell(task, node=here(task, config["nodes"]))
    if record["status"] != "ok":
        raise RankFailed(json.dumps(record, ensure_ascii=False))
    return report_of(task, record) if rank_of(task) == 0 else None


def _failed_record(task: CellTask, failures: dict[int, Exception], seconds: float) -> Record:
    """The record of the worker that failed; of one that died without any, what is known of its end."""
    told, died = _told_and_died(failures)
    if told and not (died and lost_partner(worst(told))):
        return worst(told)
    rank, cause = next(iter(died.items()), (0, RuntimeError("a worker failed")))
    detail = f"worker {rank} of {task.cell.workers} ended: {_first_line(cause)}"
    return lost_record(task.of_rank(rank), None, seconds, detail)


def _told_and_died(failures: dict[int, Exception]) -> tuple[list[Record], dict[int, Exception]]:
    """Records of the workers that failed with one, and what is known of those that died without."""
    causes = {rank: getattr(error, "_base_exc", error) for rank, error in sorted(failures.items())}
    told = [json.loads(str(cause)) for cause in causes.values() if isinstance(cause, RankFailed)]
    return told, {rank: cause for rank, cause in causes.items() if not isinstance(cause, RankFailed)}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next((line for line in lines if "exit" in line.lower()), "")
    return cause or (lines[0] if lines else type(error).__name__)
