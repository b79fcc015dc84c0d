"""The steps of measuring one cell in one process, in the order that keeps each number clean.

The cell is alone in the process until its peak memory is read; only then the control is built, the
two are compared, and timed in alternation. Training and scores come last, outside every window.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from tinydit_ray import data
from tinydit_ray.bench import memory, stats
from tinydit_ray.bench.agreement import compare, reference_of
from tinydit_ray.bench.effective import (
    CompileCounts,
    StepTrace,
    compile_counts,
    mismatches,
    no_recompiles,
    trace_facts,
    trace_step,
)
from tinydit_ray.bench.flops import model_gflops_per_step
from tinydit_ray.bench.load import FOREIGN_LOAD_PCT, LoadWindow, watch_load
from tinydit_ray.bench.peak import peak_tflops
from tinydit_ray.bench.timing import (
    MIN_QUADS,
    WARMUP_STEPS,
    CudaStopwatch,
    HostStopwatch,
    Window,
    time_pairs,
    warm_up,
)
from tinydit_ray.data import BatchStream, DataSpec, FlowBatch
from tinydit_ray.model import TinyDiT
from tinydit_ray.quality import probe_for, reference_for, save_grid, score_model, velocity_mse
from tinydit_ray.record import Record, update
from tinydit_ray.train import trainer_of
from tinydit_ray.train.ema import plain_model
from tinydit_ray.train.trainer import Diverged

if TYPE_CHECKING:
    from tinydit_ray.cell import CellTask, Phases

TIMING_BATCHES = 20  # fixed batches that timed steps go round, as in the published timings
SCORED_IMAGES = 2000  # velocity MSE is of the first 2,000 test images
LOG_EVERY = 10
STEADY_STEPS = 2  # the last of the warm-up, timed to tell the compile time from the first step
CONTROL_WARMUP_STEPS = 3  # eager, and its kernels are warm from the cell's own steps
TIMING_STREAM = 10_000  # batches of the timed window come from far along the stream, not from its start


class MeasurementError(RuntimeError):
    """What ran is not what was asked, or does not compute what it should."""


class Measurement:
    """One cell in one process. The methods are called once each, in the order they stand here."""

    def __init__(self, task: CellTask, record: Record, phases: Phases) -> None:
        self.task, self.record, self.phases = task, record, phases
        self.cell = task.cell
        self.flags: list[str] = []
        self.folder = Path(task.folder)

    def load_data(self) -> None:
        """Decoded images from the node's cache, and the fixed batches of the timed window."""
        self.spec = DataSpec.from_dict(self.task.data)
        self.images = data.load(self.spec, "train").images
        stream = self._stream(TIMING_STREAM)
        self.batches = [next(stream) for _ in range(TIMING_BATCHES)]
        update(self.record, {"batch_hash": batch_hash(self.batches)})

    def _stream(self, start: int = 0) -> BatchStream:
        stream = BatchStream(self.images, self.cell.batch_size, seed=self.cell.seed, device=self.cell.device)
        stream.step = start
        return stream

    def build(self) -> None:
        self.trainer = trainer_of(self.cell)
        self.weights = {name: tensor.clone() for name, tensor in self.trainer.model.state_dict().items()}

    def first_step(self) -> None:
        """First step apart (it compiles), warm-up, then the peak memory of the cell alone."""
        start = time.perf_counter()
        self.trainer.train_step(self.batches[0])
        self._synchronize()
        first_s = time.perf_counter() - start
        warm_up(self.trainer.train_step, self.batches, WARMUP_STEPS - STEADY_STEPS)
        steady = self._steady_step_s()
        counts = compile_counts()
        update(
            self.record,
            {
                "first_step_s": first_s,
                "compile_s": max(0.0, first_s - steady),
                "compile_cache": counts.cache,
                "peak_rss_mb": memory.peak_rss_mb(),
                "peak_device_mb": memory.peak_device_mb(self.cell.device),
            },
        )

    def _steady_step_s(self) -> float:
        start = time.perf_counter()
        warm_up(self.trainer.train_step, self.batches, STEADY_STEPS)
        self._synchronize()
        return (time.perf_counter() - start) / STEADY_STEPS

    def _synchronize(self) -> None:
        if self.cell.device == "cuda":
            torch.cuda.synchronize()

    def check(self) -> None:
        """Correct before fast: raises MeasurementError where the cell computes something else."""
        self.trainer.restart(self.weights)
        self.control = trainer_of(self.task.control_cell)
        reference = reference_of(self.cell)
        same = reference == self.task.control_cell
        found = compare(
            self.trainer, self.control if same else trainer_of(reference), self.batches[0], self.cell.precision
        )
        print(f"agreement with {reference.config_id}: {found}", flush=True)
        if not found.ok:
            raise MeasurementError(f"not correct: {found.problem}")
        warm_up(self.control.train_step, self.batches, CONTROL_WARMUP_STEPS)

    def time(self) -> None:
        """The timed window, and a traced step right after it. Inside, compiled code may neither be compiled
        again nor fall back to eager (both raise), so what the trace sees is what ran in the window."""
        counts = compile_counts()
        with watch_load() as load_window, no_recompiles():
            window = self._window()
            traced = trace_step(self.trainer, self.batches[0])
        self._note_speed(window, load_window)
        self._note_effective(traced, counts, compile_counts())

    def _window(self) -> Window:
        watch = CudaStopwatch() if self.cell.device == "cuda" else HostStopwatch()
        target = self.task.ci

        def precise(window: Window) -> bool:
            return stats.ci_reached(stats.abba_ratios(window.cell_ms, window.control_ms), target)

        return time_pairs(
            self.trainer.train_step, self.control.train_step, self.batches, seconds=self.task.seconds,
            stopwatch=watch, precise=precise if target else None, limit_s=self._time_left(),
            check_every=8 if self.cell.device == "cpu" else 32,
        )  # fmt: skip

    def _time_left(self) -> float:
        """Seconds that the window may take in all under ``--ci``: half of what the time limit leaves."""
        spent = sum(self.phases.seconds.values())
        limit = self.task.timeout_s or 600.0
        return max(self.task.seconds, (limit - spent) / 2)

    def _note_speed(self, window: Window, load: LoadWindow) -> None:
        cell, control = stats.summarise(window.cell_ms), stats.summarise(window.control_ms)
        speedup = stats.round_speedup(stats.abba_ratios(window.cell_ms, window.control_ms))
        gflops = model_gflops_per_step(self.cell)
        tflops = stats.tflops_per_s(gflops, cell.ms_per_step)
        peak, source = peak_tflops(self.cell.precision, self.cell.device)
        update(
            self.record,
            {
                "ms_per_step": cell.ms_per_step,
                "ms_per_step_iqr": cell.iqr,
                "ms_per_step_p10": cell.p10,
                "ms_per_step_p90": cell.p90,
                "timed_steps": cell.n,
                "window_s": window.seconds,
                "control_ms_per_step": control.ms_per_step,
                "speedup_vs_control": speedup.value,
                "speedup_ci_low": speedup.ci_low,
                "speedup_ci_high": speedup.ci_high,
                "images_per_s": stats.images_per_s(cell.ms_per_step, self.cell.batch_size),
                "model_gflops_per_step": gflops,
                "tflops_per_s": tflops,
                "peak_tflops": peak,
                "peak_source": source,
                "mfu": stats.mfu(tflops, peak),
                "break_even_steps": stats.break_even_steps(
                    self.record["compile_s"], cell.ms_per_step, control.ms_per_step
                ),
                "foreign_cpu_pct": load.foreign_pct,
                "ray_cpu_s": load.ray_cpu_s,
            },
        )
        self._flag_timing(window, load.foreign_pct)
        steps = {"cell_ms": window.cell_ms, "control_ms": window.control_ms, "order": "A B B A"}
        (self.folder / "steps.json").write_text(json.dumps(steps))

    def _flag_timing(self, window: Window, foreign_pct: float | None) -> None:
        flags = {
            "few-steps": window.quads <= MIN_QUADS,
            "foreign-load": foreign_pct is not None and foreign_pct > FOREIGN_LOAD_PCT,
            "concurrent": self.task.concurrent > 1,
            "ci-reached": window.reached is True,
            "ci-not-reached": window.reached is False,
            "nice": self.record["effective.nice"] != 0,
        }
        self.flags += [name for name, raised in flags.items() if raised]
        update(self.record, {"flags": ",".join(self.flags)})

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
        if wrong:
            raise MeasurementError("ran as something else: " + "; ".join(wrong))

    def train(self) -> None:
        """Train from the seeded weights on the seeded batches: the same for every cell."""
        self.trainer.restart(self.weights)
        stream = _TimedStream(self._stream())
        rows: list[tuple[int, float, float]] = []
        start = time.perf_counter()

        def on_log(step: int, loss: float) -> None:
            rows.append((step, loss, time.perf_counter() - start))

        try:
            self.trainer.fit(stream, self.task.train_steps, log_every=LOG_EVERY, on_log=on_log)
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

    def _write_loss(self, rows: list[tuple[int, float, float]]) -> None:
        with open(self.folder / "loss.csv", "w", newline="") as file:
            csv.writer(file).writerows([("step", "loss", "seconds"), *rows])

    def score(self) -> None:
        """Scores of a plain copy of the trained weights: fp32, eager, whatever trained them."""
        plain = plain_model(cast(TinyDiT, self.trainer.model))
        test = data.load(self.spec, "test")
        mse = velocity_mse(plain, test.images[:SCORED_IMAGES])
        if not math.isfinite(mse):
            raise Diverged(f"velocity MSE is {mse} after {self.trainer.steps} steps")
        update(self.record, {"velocity_mse": mse})
        if self.task.fd_images:
            self._score_samples(plain, test)

    def _score_samples(self, plain: TinyDiT, test: data.ImageSet) -> None:
        probe = probe_for(test.source)
        reference = reference_for(probe, test, data.cache_folder() / "statistics")
        found = score_model(plain, probe, reference, n=self.task.fd_images)
        save_grid(found["images"], self.folder / "samples.png")
        self.flags += [flag for flag in found["flags"].split(",") if flag]
        scores = {name: found[name] for name in ("probe_fd", "probe_fd_n", "probe_id")}
        update(self.record, {**scores, "flags": ",".join(self.flags)})


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
