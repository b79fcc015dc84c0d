"""The driver of a sweep: checks what was asked, runs every round, keeps every record, prints the table."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tinydit_ray.bench.memory import share_mb
from tinydit_ray.bench.system import SystemMetrics
from tinydit_ray.cell import CellTask, blank_record
from tinydit_ray.record import NODE_LOST_FLAG, Record, add_flags
from tinydit_ray.sweep.connect import joined, make_executor, open_tracker
from tinydit_ray.sweep.cost import print_cost, read_cluster
from tinydit_ray.sweep.ending import conclude, exit_status, leave
from tinydit_ray.sweep.errors import INTERRUPTED, OK, ExecutorLost, SweepBroken, UsageError
from tinydit_ray.sweep.floor import load_floor
from tinydit_ray.sweep.folder import SweepFolder, default_name
from tinydit_ray.sweep.interrupt import Interrupts
from tinydit_ray.sweep.ledger import Ledger
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.pace import MIN_WINDOW_S, Pace
from tinydit_ray.sweep.plan import Cell, Round, estimate_s, make_rounds, round_estimate_s
from tinydit_ray.sweep.prepare import prepare
from tinydit_ray.sweep.queue import EarlyStop, Ready
from tinydit_ray.sweep.results import rows_of_kinds, write_results
from tinydit_ray.sweep.resume import take_up
from tinydit_ray.sweep.screen import Screen, print_plan
from tinydit_ray.sweep.seeds import after_first, seed_rounds
from tinydit_ray.sweep.table import print_table
from tinydit_ray.tracking import NullTracker, Tracker, summary_files

if TYPE_CHECKING:
    from tinydit_ray.distributed.cluster import RayCluster

MAX_LOST = 3  # attempts at a round whose node is lost


class Sweep:
    """The state of a running sweep, and the queue its executor draws from."""

    print_table = staticmethod(print_table)
    early_stop: EarlyStop | None = None

    def __init__(self, options: SweepOptions, folder: SweepFolder, content: dict[str, Any], cells: list[Cell]) -> None:
        self.options, self.folder, self.content, self.cells = options, folder, content, cells
        self.space = cells  # all that may be run
        self.ledger = Ledger(folder.records())
        rounds = after_first(make_rounds(cells, options.rounds, content["sweep_id"]), seed_rounds(cells, content))
        self.rounds = deque(item for item in rounds if not self.ledger.is_done(item))
        self.running: dict[str, Round] = {}
        self.tracker: Tracker | NullTracker = NullTracker()
        self.screen: Screen | None = None
        self.system: SystemMetrics | None = None
        self.interrupts = Interrupts()
        self.searching = False  # a search has more to ask for, which is not known yet
        self.flags: list[str] = []  # of every row of this session
        self.memory_limit_mb = _memory_limit_mb(options)
        self.pace = Pace(lambda item: round_estimate_s(item, options), options.budget_s)
        self.handed_out: dict[str, float] = {}
        self._results_due = 0.0
        self.floor, self.floor_source = load_floor(content["node_kind"])

    @property
    def records(self) -> list[Record]:
        return self.ledger.records

    @property
    def new(self) -> list[Record]:
        """Records of this session."""
        return self.ledger.new

    @property
    def waiting(self) -> int:
        return len(self.rounds) or int(self.searching)

    def next(self, ready: Ready | None = None) -> CellTask | None:
        no_node_for: set[tuple[Any, ...]] = set()  # Ray asks many times a second, beside what is timed
        for item in list(self.rounds):
            status, reason = self.ledger.skip_reason(item, keep_larger=self.options.keep_larger)
            if not status and ready:
                cell = item.cell.config
                needs = (item.cell.kind, cell.workers, cell.cpus_per_worker, cell.gpus_per_worker)
                if needs in no_node_for or not ready(cell, item.cell.kind):
                    no_node_for.add(needs)
                    continue
            window_s = self._window_s()
            self.rounds.remove(item)
            task = self.task_of(item, window_s or 0.0)
            if not status and not window_s:
                status, reason = "skipped", f"--budget {self.options.budget_s:.0f} s is used up"
            if status:
                self._leave_out(item, task, status, reason)
                continue
            self.running[task.folder] = item
            self.handed_out[task.folder] = time.monotonic()
            with self.writing():
                if self.screen:
                    self.screen.started(item, Path(task.folder))
                    self.tell()
            return task
        return None

    def _leave_out(self, item: Round, task: CellTask, status: str, reason: str) -> None:
        """The row of a round that gets no trial."""
        with self.writing():
            self._keep(item, task, {**blank_record(task), "status": status, "reason": reason})

    def standing(self, at_once: int, waits_for: str = "") -> None:
        self.pace.at_once = at_once
        if self.screen:
            self.screen.waits_for(waits_for)

    def give_up(self, ready: Ready, reason: str) -> None:
        for item in [item for item in self.rounds if not ready(item.cell.config, item.cell.kind)]:
            self.rounds.remove(item)
            self._leave_out(item, self.task_of(item, 0.0), "failed", reason)

    def _window_s(self) -> float | None:
        """Timed seconds of the next round, within the budget; None where the budget has no place for it."""
        options = self.options
        planned = options.time_s / options.rounds
        if not options.budget_s:
            return planned
        left = self.pace.budget_left_s()
        window = self.pace.window_s(planned, self.rounds, left)
        if window is None and self.rounds[0].number == 1:
            return min(planned, MIN_WINDOW_S)  # each cell gets a row of its own, late or not
        return window

    def _train_limit_s(self) -> float:
        """Under a budget no cell trains longer than its share of what is left; later rounds count as one cell more."""
        if not self.options.budget_s:
            return 0.0
        left = self.pace.budget_left_s()
        return max(MIN_WINDOW_S, left / (2 + sum(item.number == 1 for item in self.rounds)))

    def task_of(self, item: Round, window_s: float) -> CellTask:
        """The next attempt at a round."""
        options, cell = self.options, item.cell
        attempt = self.ledger.next_attempt(item)
        while self.folder.round_folder(item, attempt).exists():  # one that was interrupted has no record
            attempt += 1
        first = item.number == 1
        return CellTask(
            identity=self._identity(item, attempt), config=cell.config.asdict(), control=cell.control.asdict(),
            data=self.content["data"]["spec"], folder=str(self.folder.round_folder(item, attempt)),
            compile_cache=str(self.folder.compile_cache), seconds=window_s, times=cell.times, flags=cell.flags,
            explain=first and cell.config.compile != "off", ci=options.ci, storage=self.content.get("storage") or "",
            train_steps=options.steps if first else 0, fd_images=options.fd_images, ema=options.ema,
            timeout_s=options.cell_timeout_s, train_limit_s=self._train_limit_s() if first else 0.0,
            memory_limit_mb=self.memory_limit_mb / cell.config.workers, wait_quiet_s=options.wait_quiet_s,
            max_failures=options.max_failures if cell.config.workers > 1 else 0, queued_at=time.time(),
        )  # fmt: skip

    def _identity(self, item: Round, attempt: int) -> dict[str, Any]:
        content, cell = self.content, item.cell
        return {
            "sweep_id": content["sweep_id"], "config_id": cell.config.config_id, "cell_id": cell.cell_id,
            "cell_name": cell.name, "repeat": cell.repeat, "round": item.number, "attempt": attempt,
            "product_version": content["product_version"], "git_commit": content["git_commit"],
            "node_kind": cell.kind, "node_id": None if self.options.address else content["machine"]["node_id"],
            "data_source": content["data"]["source"], "data_digest": content["data"]["digest"],
        }  # fmt: skip

    def done(self, task: CellTask, record: Record, files: dict[str, bytes]) -> None:
        with self.writing():
            self._done(task, record, files)

    def _done(self, task: CellTask, record: Record, files: dict[str, bytes]) -> None:
        item = self.running.pop(task.folder)
        if record["status"] == "ok":
            self.pace.finished(item, time.monotonic() - self.handed_out[task.folder])
        self._lay_down(task, files)
        self._keep(item, task, record)

    def _lay_down(self, task: CellTask, files: dict[str, bytes]) -> None:
        folder = Path(task.folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if not (folder / name).exists():
                (folder / Path(name).name).write_bytes(content)

    def lost(self, task: CellTask, record: Record, files: dict[str, bytes]) -> None:
        with self.writing():
            item = self.running.pop(task.folder)
            self._lay_down(task, files)
            if self.ledger.times_lost(item) + 1 >= MAX_LOST:
                record["reason"] = f"its node was lost {MAX_LOST} times"
                self._keep(item, task, record)
                return
            add_flags(record, [NODE_LOST_FLAG])
            self._store(task, record)
            self.rounds.appendleft(item)
            if self.screen:
                self.screen.lost(item, record)
                self.tell()

    def _keep(self, item: Round, task: CellTask, record: Record) -> None:
        """The sweep folder first, then MLflow, then the screen."""
        self._store(task, record)
        if self.screen:
            self.screen.finished(item, record)
            self.tell()

    def _store(self, task: CellTask, record: Record) -> None:
        add_flags(record, self.flags)
        self.folder.append(record)
        self.ledger.add(record)
        self._write_results_when_due()
        folder = Path(task.folder)
        files = {path.name: path for path in folder.glob("*") if path.is_file()} if folder.exists() else {}
        self.tracker.log_record(record, files)

    def executor_lost(self, why: str) -> None:
        """Ray is gone, and its library does not return: end here, in the thread that noticed."""
        leave(self, self.broken(ExecutorLost(why)))

    def tell(self, *, ended: bool = False) -> None:
        """Where the sweep stands, for ``analysis/watch.py``; between rounds, so that it disturbs no window."""
        if self.screen:
            standing = self.screen.standing(self.folder.path, ended=ended)
            standing.write(self.folder.path)
            self.tracker.tell(standing.to_json())
            self.tracker.log_samples(self.system.take() if self.system else [])

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A signal waits for the end of the block; a disk that takes nothing more ends the sweep."""
        with self.interrupts.shield():
            try:
                yield
            except OSError as error:
                raise self.broken(error) from None

    def broken(self, error: OSError | ExecutorLost) -> SweepBroken:
        """What ends the sweep where a file cannot be written, or nobody is left to run trials."""
        what = str(error)
        if isinstance(error, OSError):
            what = f"{error.filename or self.folder.path}: cannot be written ({error.strerror or error})"
        return SweepBroken(f"{what}; what is recorded stays, go on with --resume {self.folder.path.name}")

    def _write_results_when_due(self) -> None:
        """The parquet file follows the records, at a tenth of the time at most: it grows with the sweep."""
        if time.monotonic() < self._results_due:
            return
        start = time.monotonic()
        rows = self.rows()
        write_results(self.folder.path / "results.parquet", rows)
        if self.screen:
            self.screen.note(rows)
        self._results_due = time.monotonic() + 10 * (time.monotonic() - start)

    def best_rows(self) -> list[dict[str, Any]]:
        """Rows that ``best.yaml`` is chosen from."""
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        """Rows of this sweep's cells and of removed ones, in the order of the grid."""
        order = {cell.cell_id: i for i, cell in enumerate(self.cells)}
        rows = rows_of_kinds(self.records)
        return sorted(rows, key=lambda row: (order.get(row["cell_id"], len(order)), row["round"] or 0))


Finish = Callable[[Sweep, Console], None]  # what a script prints beyond the table


def _memory_limit_mb(options: SweepOptions) -> float:
    if options.memory_limit_gb or options.address:  # what is free here says nothing of other machines
        return 1e3 * (options.memory_limit_gb or 0.0)
    return share_mb(options.concurrent if isinstance(options.concurrent, int) else 1)


def run_sweep(
    options: SweepOptions,
    console: Console,
    finish: Finish | None = None,
    make: type[Sweep] = Sweep,
) -> int:
    """Run a sweep to its end and print its table; returns the exit status.

    ``finish`` adds what a script prints beyond the table, ``make`` is the kind of sweep. Raises
    UsageError before any trial where something asked for cannot be done.
    """
    with Interrupts().listening() as interrupts, joined(options, console) as cluster:
        content, cells, duplicates = prepare(options, console, cluster)
        if options.dry_run:
            rounds = make_rounds(cells, options.rounds, "") + seed_rounds(cells, content)
            print_plan(console, cells, estimate_s(rounds, options), options)
            if options.cluster:
                print_cost(console, read_cluster(options.cluster), rounds, options)
            return OK
        content["name"] = name = options.name or default_name(options.grid_name)
        folder = SweepFolder.open(options.out, name, resume=options.resume)
        try:
            flags = take_up(folder, options, content, console) if options.resume else []
            folder.write_sweep(content)
            sweep = make(options, folder, content, cells)
            sweep.interrupts, sweep.flags = interrupts, flags
            if duplicates:
                console.print(f"{duplicates} duplicate cells removed")
            return _run(sweep, console, finish, cluster)
        except UsageError:
            if not options.resume:
                folder.discard()  # nothing was measured: the same name can be used again
            raise
        finally:
            folder.close()


def _run(sweep: Sweep, console: Console, finish: Finish | None, cluster: RayCluster | None) -> int:
    from tinydit_ray.sweep.quiet import quiet_output

    options, folder = sweep.options, sweep.folder
    interrupted, broken = False, None
    with ExitStack() as stack:
        console = stack.enter_context(quiet_output(folder.logs / "driver.log"))
        sweep.tracker = open_tracker(options, sweep.content, folder)
        folder.write_sweep(sweep.content)
        configs, kind = [cell.config for cell in sweep.space], sweep.content["node_kind"]
        executor = make_executor(options, configs, kind, sweep.early_stop, cluster)
        stack.callback(executor.close)
        if options.system_metrics:
            sweep.system = SystemMetrics()
            stack.callback(sweep.system.close)
        sweep.interrupts.install()
        sweep.screen = Screen(console, sweep.rounds, sweep.pace)
        try:
            with sweep.screen:
                executor.run(sweep)
        except KeyboardInterrupt:
            interrupted = True
        except SweepBroken as error:
            broken = error
        except (OSError, ExecutorLost) as error:
            broken = sweep.broken(error)
        except BaseException:
            sweep.tracker.finish(status="FAILED", summary=summary_files(folder.path), pooled=None)
            raise
        try:
            with sweep.writing():
                rows = conclude(sweep, console, finish, interrupted=interrupted or broken is not None)
        except SweepBroken as error:
            broken = broken or error  # the first one says why
    if broken:
        raise broken
    return INTERRUPTED if interrupted else exit_status(rows, sweep)
