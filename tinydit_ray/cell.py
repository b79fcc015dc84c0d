"""One cell, one round, one process: measure it and return its record.

``python -m tinydit_ray.cell TASK.json`` does it in a process of its own (the ``--no-ray`` path);
under Ray the same ``run_cell`` is called inside a Train worker.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinydit_ray.bench import load, memory
from tinydit_ray.bench.machine import node_kind, versions
from tinydit_ray.config import CellConfig
from tinydit_ray.process import cell_process, process_start_time, set_environment, started_fresh
from tinydit_ray.record import Record, new_record, update

if TYPE_CHECKING:
    from tinydit_ray.measure import Measurement

RECORD_FILE = "record.json"


@dataclass(frozen=True, kw_only=True)
class CellTask:
    """All that a trial needs to know, in plain types: it travels to other nodes as JSON.

    ``seconds`` is this round's timed window; ``train_steps`` 0 leaves training and scores out, ``fd_images`` 0
    probe-FD; ``folder`` is where files of this round go, ``compile_cache`` the sweep's own Inductor cache.
    """

    identity: dict[str, Any]  # sweep_id, cell_id, cell_name, repeat, round, attempt, versions …
    config: dict[str, Any]
    control: dict[str, Any]
    data: dict[str, Any]
    folder: str
    compile_cache: str
    seconds: float
    ci: float = 0.0
    train_steps: int = 0
    fd_images: int = 0
    timeout_s: float = 0.0
    memory_limit_mb: float = 0.0
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
    def control_cell(self) -> CellConfig:
        return CellConfig(**self.control)


def blank_record(task: CellTask) -> Record:
    """The record of a task of which nothing is known yet but what was asked."""
    return new_record(
        **task.identity,
        **task.cell.columns(),
        seed=task.cell.seed,
        concurrent_trials=task.concurrent,
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
    """How this process began: seconds since the epoch, whether it was fresh, and what importing torch took."""

    born: float
    entered: float
    fresh: bool
    import_s: float


def enter(task: CellTask) -> Entry:
    """Set the threads and caches that libraries read once, then import torch. Called first in a trial's process."""
    born, entered, fresh = process_start_time(), time.time(), started_fresh()
    set_environment(task.cell.cpus_per_worker, Path(task.compile_cache))
    start = time.perf_counter()
    import torch  # noqa: F401

    return Entry(born, entered, fresh, time.perf_counter() - start)


def run_cell(task: CellTask, entry: Entry | None = None) -> Record:
    """Measure one cell in this process. Always returns a record; what went wrong is its status and reason.

    Files beside it in ``task.folder``: log.txt, steps.json (raw step times), loss.csv.
    """
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    record = blank_record(task)
    entry = entry or enter(task)
    phases = Phases(folder)
    phases.seconds["import"] = entry.import_s
    with cell_process(log=folder / "log.txt", memory_limit_mb=task.memory_limit_mb, timeout_s=task.timeout_s):
        update(record, {"effective.fresh_process": "yes" if entry.fresh else "no"})
        try:
            _measure(task, record, phases)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            traceback.print_exc()
            _note_failure(record, error)
    _note_costs(task, record, phases, entry)
    (folder / RECORD_FILE).write_text(json.dumps(record, ensure_ascii=False))
    return record


def _measure(task: CellTask, record: Record, phases: Phases) -> None:
    with phases("import"):
        import torch

        from tinydit_ray.bench.capability import check_capability
        from tinydit_ray.bench.effective import process_facts
        from tinydit_ray.measure import Measurement
    torch.set_num_threads(task.cell.cpus_per_worker)
    check_capability(task.cell)
    update(record, process_facts(task.cell))
    update(record, {"effective.ray": versions().get("ray", "none"), "node_kind": node_kind(task.cell.device)})
    bench = Measurement(task, record, phases)
    with phases("data"):
        bench.load_data()
    with phases("build"):
        bench.build()
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
    if task.train_steps:
        _train_and_score(bench, phases)


def _train_and_score(bench: Measurement, phases: Phases) -> None:
    with phases("training"):
        bench.train()
    with phases("scores"):
        bench.score()


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
    task = CellTask.from_json(Path(arguments[0]).read_text())
    run_cell(task)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
