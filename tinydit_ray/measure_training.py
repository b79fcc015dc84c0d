"""Training and scoring one cell in one process, without any timing: the part that every kind of trial shares.

All cells of one size, batch and seed start from the same weights and see the same images, noise and times in the
same order (``batch_hash``), so that scores differ by the settings alone.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from tinydit_ray import data
from tinydit_ray.bench.agreement import relative_error
from tinydit_ray.bench.effective import (
    CompileCounts,
    StepTrace,
    compile_counts,
    mismatches,
    trace_facts,
    trace_step,
)
from tinydit_ray.data import BatchStream, DataSpec, FlowBatch
from tinydit_ray.model import TinyDiT
from tinydit_ray.network import plain_network
from tinydit_ray.quality import probe_for, reference_for, save_grid, score_model, velocity_mse
from tinydit_ray.record import Record, update
from tinydit_ray.storage import Storage, StorageError
from tinydit_ray.train import trainer_of
from tinydit_ray.train.ema import Ema
from tinydit_ray.train.going_on import TrialCheckpoint
from tinydit_ray.train.group import backend_of, current_group
from tinydit_ray.train.trainer import Diverged

if TYPE_CHECKING:
    from tinydit_ray.cell import CellTask, Phases

Report = Callable[[Record, float], None]  # the record so far, and how much of its budget the trial has used

TIMING_BATCHES = 20  # fixed batches that timed steps go round, as in the published timings
TIMING_STREAM = 10_000  # batches of the timed window come from far along the stream, not from its start
SCORED_IMAGES = 2000  # velocity MSE is of the first 2,000 test images
LOG_EVERY = 10
SAME_WEIGHTS = 1e-4  # relative L2; workers on different processors may differ in the last bits


class MeasurementError(RuntimeError):
    """What ran is not what was asked, or does not compute what it should."""


class TrainedCell:
    """One cell in one process, or in one of the workers that train it together. The methods are called once each,
    in the order they stand here, and by all workers alike: each exchanges numbers with the others."""

    def __init__(self, task: CellTask, record: Record, phases: Phases) -> None:
        self.task, self.record, self.phases = task, record, phases
        self.cell = task.cell
        self.flags = [task.flags] if task.flags else []
        self.folder = Path(task.folder)
        self.group = current_group(self.cell.device)
        backend = backend_of(self.cell.device) if self.group.size > 1 else "none"
        update(record, {"effective.workers": self.group.size, "effective.backend": backend})
        restarts = bool(task.max_failures)
        self.checkpoint = TrialCheckpoint(self.folder / "checkpoint", self.group) if restarts else None
        self.report: Report | None = None  # called with the record so far, where somebody waits for it

    def load_data(self) -> None:
        """Decoded images from the node's cache, and the fixed batches of the timed window."""
        self.spec = DataSpec.from_dict(self.task.data)
        self.images = data.load(self.spec, "train").images
        stream = self._stream(TIMING_STREAM)
        self.batches = [next(stream) for _ in range(TIMING_BATCHES)]
        whole = [FlowBatch(*(self.group.whole(part) for part in batch)) for batch in self.batches]
        update(self.record, {"batch_hash": batch_hash(whole)})

    def _stream(self, start: int = 0) -> BatchStream:
        stream = BatchStream(
            self.images, self.cell.batch_size, seed=self.cell.seed, device=self.cell.device,
            rank=self.group.rank, world_size=self.group.size,
        )  # fmt: skip
        stream.step = start
        return stream

    def build(self) -> None:
        self.trainer = trainer_of(self.cell, group=self.group)
        self.weights = {name: tensor.clone() for name, tensor in self.trainer.model.state_dict().items()}

    def _highest(self, **values: float | None) -> dict[str, float | None]:
        """Each value of the worker that has most of it (-inf stands for None on the way)."""
        given = [-math.inf if value is None else value for value in values.values()]
        found = self.group.highest(given)
        return {name: None if value == -math.inf else value for name, value in zip(values, found, strict=True)}

    def _synchronize(self) -> None:
        if self.cell.device == "cuda":
            torch.cuda.synchronize()

    def is_to_be_trained(self) -> bool:
        return bool(self.task.train_steps or self.task.train_s)

    def train(self) -> None:
        """Train from the seeded weights on the seeded batches: the same for every cell."""
        self.trainer.restart(self.weights)
        self.ema = Ema(self.trainer.model, self.task.ema) if self.task.ema else None
        stream = _TimedStream(self._stream())
        rows = self._go_on(stream.stream)
        start = time.perf_counter() - (rows[-1][2] if rows else 0.0)

        def on_log(step: int, loss: float) -> None:
            rows.append((step, loss, time.perf_counter() - start))
            if self.checkpoint:
                ema = None if self.ema is None else self.ema.state_dict()
                saved = {"stream": stream.stream.state_dict(), "rows": rows, "ema": ema}
                self.checkpoint.save_when_due(self.trainer, **saved)

        try:
            average = self.ema.update if self.ema is not None else None
            self.trainer.fit(stream, self.task.train_steps, log_every=LOG_EVERY, on_log=on_log, on_step=average)
        finally:
            self._write_loss(rows)
            trained = {"train_loss_last": rows[-1][1]} if rows else {}
            counted = {
                "steps_trained": self.trainer.steps,
                "skipped_optimizer_steps": self.trainer.skipped_steps,
                "train_wall_s": time.perf_counter() - start,
                "batch_ms": stream.ms_per_batch,
            }
            update(self.record, trained | counted)
        update(self.record, self._highest(train_wall_s=self.record["train_wall_s"], batch_ms=stream.ms_per_batch))
        self._check_replicas()

    def _go_on(self, stream: BatchStream) -> list[tuple[int, float, float]]:
        """Take over what an earlier start of this trial left behind; (step, loss, seconds) of its training so far."""
        state = self.checkpoint.load(self.trainer) if self.checkpoint else None
        if state is None:
            return []
        stream.load_state_dict(state["stream"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        print(f"a worker of this trial died: training goes on at step {self.trainer.steps}", flush=True)
        return [(step, loss, seconds) for step, loss, seconds in state["rows"]]

    def _check_replicas(self) -> None:
        """Raises MeasurementError where workers trained apart: their weights must be those of rank 0."""
        if self.group.size == 1:
            return
        for name, tensor in self.trainer.model.state_dict().items():
            first = self.group.of_first(tensor)
            error = 0.0 if torch.equal(tensor, first) else relative_error(tensor, first)
            if not error <= SAME_WEIGHTS:
                raise MeasurementError(f"{name} of rank {self.group.rank} differs from rank 0's by {error:.2g} (L2)")

    def _write_loss(self, rows: list[tuple[int, float, float]]) -> None:
        with open(self.folder / "loss.csv", "w", newline="") as file:
            csv.writer(file).writerows([("step", "loss", "seconds"), *rows])

    def score(self) -> None:
        """Scores of a plain copy of the trained weights, and of their average: fp32, eager, whatever trained them."""
        test = data.load(self.spec, "test")
        self._score(plain_network(self.cell, self.trainer.model), test, "")
        if self.ema is not None:
            update(self.record, {"ema_decay": self.ema.decay})
            self._score(plain_network(self.cell, self.trainer.model, self.ema.weights), test, "_ema")

    def store(self) -> None:
        """The trained weights in the sweep's storage, fp32 under the plain module's names, with the cell's settings.
        What goes wrong there is a flag and a reason, and does not undo what was measured."""
        where = Storage(self.task.storage)
        plain = plain_network(self.cell, self.trainer.model).state_dict()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in plain.items()}
        about = {"config": json.dumps(self.cell.asdict()), "cell": self.task.identity["cell_name"]}
        try:
            uri = where.write(f"{self.task.storage_name}/weights.safetensors", save(tensors, metadata=about))
        except StorageError as error:
            self.flags.append("not-stored")
            reason = f"weights were not stored: {error}"
            update(self.record, {"flags": ",".join(self.flags), "reason": self.record["reason"] or reason})
            return
        update(self.record, {"weights_uri": uri})

    def _score(self, plain: TinyDiT, test: data.ImageSet, suffix: str) -> None:
        """``suffix`` is that of the columns, and of the grid of samples."""
        update(self.record, {f"velocity_mse{suffix}": self._velocity_mse(plain, test)})
        if self.task.fd_images:
            self._score_samples(plain, test, suffix)

    def _velocity_mse(self, plain: TinyDiT, test: data.ImageSet) -> float:
        mse = velocity_mse(plain, test.images[:SCORED_IMAGES])
        if not math.isfinite(mse):
            raise Diverged(f"velocity MSE is {mse} after {self.trainer.steps} steps")
        return mse

    def _score_samples(self, plain: TinyDiT, test: data.ImageSet, suffix: str) -> None:
        probe = probe_for(test.source)
        reference = reference_for(probe, test, data.cache_folder() / "statistics")
        found = score_model(plain, probe, reference, n=self.task.fd_images)
        save_grid(found["images"], self.folder / f"samples{suffix}.png")
        self._note_samples(found, suffix)

    def _note_samples(self, found: dict[str, Any], suffix: str) -> None:
        """Scores of ``probe_scores`` into the record."""
        self.flags += [flag for flag in found["flags"].split(",") if flag and flag not in self.flags]
        scores = {"probe_fd_n": found["probe_fd_n"], "probe_id": found["probe_id"], "flags": ",".join(self.flags)}
        update(self.record, {**scores, f"probe_fd{suffix}": found["probe_fd"]})

    def note_what_ran(self) -> None:
        """For trials without a timed window: a traced step after the scores. Raises MeasurementError."""
        counts = compile_counts()
        traced = trace_step(self.trainer, self.batches[0])
        self._note_effective(traced, counts, compile_counts())
        update(self.record, {"compile_cache": compile_counts().cache})
        self.judge_effective()

    def _note_effective(self, traced: StepTrace, before: CompileCounts, after: CompileCounts) -> None:
        weight_dtype = next(self.trainer.model.parameters()).dtype
        facts = trace_facts(traced, after, weight_dtype)
        compiled = "yes" if traced.compiled_regions else "no"
        facts["effective.compiled_in_window"] = compiled if before == after else "recompiled"
        update(self.record, facts)

    def judge_effective(self) -> None:
        """Raises MeasurementError where what ran is not what was asked."""
        wrong = mismatches(self.cell, self.record, self.cell.cpus_per_worker)
        if self.record["effective.fresh_process"] != "yes":
            wrong.append("process: asked a fresh one, ran in one that had torch loaded already")
        if self.group.size != self.cell.workers:
            wrong.append(f"workers: asked {self.cell.workers}, ran {self.group.size}")
        wrong = sorted({text for found in self.group.objects(wrong) for text in found})
        if wrong:
            raise MeasurementError("ran as something else: " + "; ".join(wrong))


class _TimedStream:
    """Batches, and the milliseconds that making them took."""

    def __init__(self, stream: BatchStream) -> None:
        self.stream, self.seconds, self.count = stream, 0.0, 0

    def __iter__(self) -> _TimedStream:
        return self

    def __next__(self) -> FlowBatch:
        start = time.perf_counter()
        batch = next(self.stream)
        self.seconds += time.perf_counter() - start
        self.count += 1
        return batch

    @property
    def ms_per_batch(self) -> float | None:
        return 1e3 * self.seconds / self.count if self.count else None


def batch_hash(batches: list[FlowBatch]) -> str:
    """Hash over images, noise and times of the timed batches: equal for all cells of a sweep."""
    digest = hashlib.sha256()
    for batch in batches:
        for tensor in batch:
            digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
