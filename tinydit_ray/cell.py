"""One cell, one round, one process: measure it and return its record.

``python -m tinydit_ray.cell TASK.json`` does it in a process of its own (the ``--no-ray`` path);
under Ray the same ``run_cell`` is called inside a Train worker. A cell of several workers runs it in each of them
(RANK of WORLD_SIZE); rank 0's record is the cell's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinydit_ray.atomic import replace_text
from tinydit_ray.bench import load, memory
from tinydit_ray.bench.machine import node_kind, versions
from tinydit_ray.config import CellConfig
from tinydit_ray.process import (
    cell_process,
    end_with_parent,
    keep_freed_memory,
    process_start_time,
    set_environment,
    started_fresh,
)
from tinydit_ray.record import Record, new_record, update

if TYPE_CHECKING:
    from tinydit_ray.measure import Measurement
    from tinydit_ray.measure_training import Report, TrainedCell

RECORD_FILE = "record.json"


class WrongNode(RuntimeError):
    """A trial was placed on a node that it is not for."""


@dataclass(frozen=True, kw_only=True)
class CellTask:
    """All that a trial needs to know, in plain types: it travels to other nodes as JSON.

    ``times`` says what a block of the timed window is: "step", one training step, or "sampler", one batch of
    images; with "nothing" the cell is trained and scored alone; with "quality" it is trained for ``train_steps``
    or ``train_s`` seconds and scored along the way as well: ``target`` is the velocity MSE whose moment is looked
    for, and ``reports`` says that somebody who schedules the trials waits for the scores.
    ``seconds`` is this round's timed window; ``train_steps`` 0 leaves training and scores out, ``fd_images`` 0
    probe-FD; ``ema`` is the decay of averaged weights that are scored beside the raw ones, 0 for none; ``explain``
    keeps what the compiler made of the cell; ``storage`` is where trained weights go (``storage.py``), "" for nowhere;
    ``folder`` is where files of this round go, ``compile_cache`` the
    sweep's own Inductor cache; ``flags`` are on the row from the start, whatever becomes of the trial.

    ``train_limit_s`` is how long training may take by the steps just timed (0: as long as the trial): a cell too slow
    for it is timed and not trained, flag ``not-trained``. ``max_failures`` is how often a trial of several workers is
    started again because one of them died; its training then goes on from the last checkpoint.
    """

    identity: dict[str, Any]  # sweep_id, cell_id, cell_name, repeat, round, attempt, versions …
    config: dict[str, Any]
    control: dict[str, Any]
    data: dict[str, Any]
    folder: str
    compile_cache: str
    seconds: float
    times: str = "step"
    flags: str = ""
    ci: float = 0.0
    train_steps: int = 0
    train_s: float = 0.0
    target: float = 0.0
    reports: bool = False
    fd_images: int = 0
    ema: float = 0.0
    explain: bool = False
    storage: str = ""
    timeout_s: float = 0.0
    memory_limit_mb: float = 0.0
    train_limit_s: float = 0.0
    max_failures: int = 0
    wait_quiet_s: float = 0.0
    concurrent: int = 1
    queued_at: float = 0.0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> CellTask:
        return cls(**json.loads(text))

    @property
    def cell(self) -> CellConfig:
        return CellConfig(**self.config)

    @property
    def storage_name(self) -> str:
        """SWEEP/CELL/ROUND, as in the sweep's own folder."""
        place = Path(self.folder)
        return "/".join([place.parents[2].name, place.parents[0].name, place.name])

    def of_rank(self, rank: int) -> CellTask:
        """The same for one of several workers: files of other ranks than 0 lie in a folder of their own."""
        return dataclasses.replace(self, folder=str(Path(self.folder) / f"rank{rank}")) if rank else self

    @property
    def control_cell(self) -> CellConfig:
        return CellConfig(**self.control)


def blank_record(task: CellTask) -> Record:
    """The record of a task of which nothing is known yet but what was asked."""
    return new_record(
        **task.identity,
        **task.cell.columns(),
        seed=task.cell.seed,
        concurrent_trials=task.concurrent,
        flags=task.flags or None,
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )


class Phases:
    """Wall seconds by phase, and a word on disk for whoever watches this trial."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        (self.folder / "phase").write_text(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Entry:
    """How this process began: seconds since the epoch, whether it was fresh, what importing torch took, and what
    malloc does with freed memory."""

    born: float
    entered: float
    fresh: bool
    import_s: float
    malloc: str


def enter(task: CellTask, *, grouped: bool = False) -> Entry:
    """Set the threads and caches that libraries read once, then import torch. Called first in a trial's process;
    ``grouped``: in a worker of Ray Train's, which has imported torch already."""
    born, entered = process_start_time(), time.time()
    fresh = started_fresh(grouped=grouped or task.cell.workers > 1)
    set_environment(task.cell.cpus_per_worker, Path(task.compile_cache))
    malloc = keep_freed_memory()
    start = time.perf_counter()
    import torch  # noqa: F401

    return Entry(born, entered, fresh, time.perf_counter() - start, malloc)


def run_cell(
    task: CellTask, entry: Entry | None = None, report: Report | None = None, node: Mapping[str, str] | None = None
) -> Record:
    """Measure one cell in this process. Always returns a record; what went wrong is its status and reason.
    ``report`` is called with the record so far by trials that are scored along the way. ``node`` names the machine
    where it is one of a cluster: ``node_id node_ip node_kind``.

    Files beside it in ``task.folder``: log.txt, steps.json (raw step times), loss.csv.
    """
    task = task.of_rank(rank_of(task))
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    record = blank_record(task)
    entry = entry or enter(task)
    phases = Phases(folder)
    phases.seconds["import"] = entry.import_s
    with cell_process(log=folder / "log.txt", memory_limit_mb=task.memory_limit_mb, timeout_s=task.timeout_s):
        fresh = "yes" if entry.fresh else "no"
        update(record, {"effective.fresh_process": fresh, "effective.malloc": entry.malloc})
        try:
            _measure(task, record, phases, report, node or {})
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            traceback.print_exc()
            _note_failure(record, error)
    _note_costs(task, record, phases, entry)
    replace_text(folder / RECORD_FILE, json.dumps(record, ensure_ascii=False))
    return record


def rank_of(task: CellTask) -> int:
    """Which of the cell's workers this process is."""
    return int(os.environ.get("RANK", "0")) if task.cell.workers > 1 else 0


def _measure(
    task: CellTask, record: Record, phases: Phases, report: Report | None, node: Mapping[str, str]
) -> None:
    with phases("import"):
        import torch

        from tinydit_ray.bench.capability import check_capability, check_group
        from tinydit_ray.bench.effective import process_facts
        from tinydit_ray.measure import Measurement
        from tinydit_ray.measure_quality import QualityRun
        from tinydit_ray.measure_sampler import SamplerMeasurement
        from tinydit_ray.measure_training import TrainedCell
        from tinydit_ray.train.group import join_from_environment
    torch.set_num_threads(task.cell.cpus_per_worker)
    check_group(task.cell, task.times)
    check_capability(task.cell)
    if task.cell.workers > 1:
        with phases("join"):
            join_from_environment(task.cell.device)
    update(record, process_facts(task.cell))
    update(record, {"effective.ray": versions().get("ray", "none")})
    _note_node(task, record, node)
    kinds = {"step": Measurement, "sampler": SamplerMeasurement, "nothing": TrainedCell, "quality": QualityRun}
    bench = kinds[task.times](task, record, phases)
    bench.report = report
    with phases("data"):
        bench.load_data()
    with phases("build"):
        bench.build()
    if isinstance(bench, Measurement):
        _time(bench, task, phases)
    if bench.is_to_be_trained():
        _train_and_score(bench, phases)
    if not isinstance(bench, Measurement):
        with phases("checks"):
            bench.note_what_ran()
    elif task.explain and bench.group.rank == 0:
        with phases("explain"):
            bench.explain()


def _note_node(task: CellTask, record: Record, node: Mapping[str, str]) -> None:
    """Where the cell really runs. Raises WrongNode on another kind of node than its cell is of: it would be pooled with
    rounds that it must not be compared with."""
    update(record, node or {"node_kind": node_kind(task.cell.device)})
    wanted = task.identity["node_kind"]
    if node and node["node_kind"] != wanted:
        update(record, {"node_kind": wanted})
        raise WrongNode(f"this node is a {node['node_kind']}, the cell is of {wanted}")


def _time(bench: Measurement, task: CellTask, phases: Phases) -> None:
    with phases("first step"):
        bench.first_step()
    with phases("checks"):
        bench.check()
    if task.wait_quiet_s:
        with phases("wait for quiet"):
            load.wait_until_quiet(task.wait_quiet_s, quiet_pct=load.FOREIGN_LOAD_PCT)
    with phases("timing"):
        bench.time()
    bench.judge_effective()


def _train_and_score(bench: TrainedCell, phases: Phases) -> None:
    with phases("training"):
        bench.train()
    if bench.group.rank == 0:
        with phases("scores"):
            bench.score()
        if bench.task.storage:
            with phases("storage"):
                bench.store()
        if bench.checkpoint:
            bench.checkpoint.remove()


def _note_failure(record: Record, error: BaseException) -> None:
    from tinydit_ray.bench.capability import Unsupported
    from tinydit_ray.train.trainer import Diverged

    last = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
    if isinstance(error, Unsupported):
        status, reason = "unsupported", last
    elif isinstance(error, Diverged):
        status, reason = "diverged", last
    elif memory.is_oom(error):
        status, reason = "oom", f"out of memory: {last}"
    else:
        status, reason = "failed", f"{type(error).__name__}: {last}"
    update(record, {"status": status, "reason": reason})


def _note_costs(task: CellTask, record: Record, phases: Phases, entry: Entry) -> None:
    """Phases, and what the trial cost beside the cell's own work: waiting, starting the process, the record."""
    seconds = phases.seconds
    known = {"import_s": seconds.get("import"), "data_s": seconds.get("data"), "build_s": seconds.get("build")}
    queued = max(0.0, entry.born - task.queued_at) if task.queued_at else None
    update(record, {**known, "queued_s": queued, "start_s": max(0.0, entry.entered - entry.born)})
    if task.queued_at:
        record["orchestration_s"] = time.time() - task.queued_at - sum(seconds.values())
    if record["status"] is None:
        record["status"] = "ok"
    (Path(task.folder) / "phases.json").write_text(json.dumps(seconds))


def main(arguments: list[str]) -> int:
    """Exit status 1 where one of several workers failed: the others, who wait for it, are to be ended."""
    end_with_parent()
    task = CellTask.from_json(Path(arguments[0]).read_text())
    record = run_cell(task)
    return int(task.cell.workers > 1 and record["status"] != "ok")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
