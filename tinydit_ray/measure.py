"""The steps of measuring one cell in one process, in the order that keeps each number clean.

The cell is alone in the process until its peak memory is read; only then the control is built, the
two are compared, and timed in alternation. Training and scores come last, outside every window.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Sequence
from typing import Any

from tinydit_ray.bench import memory, stats
from tinydit_ray.bench.agreement import Averaged, compare, reference_of
from tinydit_ray.bench.effective import compile_counts, no_recompiles, trace_step
from tinydit_ray.bench.explain import EXPLAIN_FILE, explain_text
from tinydit_ray.bench.flops import model_gflops_per_step
from tinydit_ray.bench.gpu import GpuWindow, watch_gpu
from tinydit_ray.bench.load import FOREIGN_LOAD_PCT, LoadWindow, watch_load
from tinydit_ray.bench.peak import measure_gbytes_per_s, peak_tflops
from tinydit_ray.bench.timing import (
    MIN_QUADS,
    WARMUP_STEPS,
    CudaStopwatch,
    GroupStopwatch,
    HostStopwatch,
    Step,
    Stopwatch,
    Window,
    time_pairs,
    warm_up,
)
from tinydit_ray.bench.traffic import gbytes_per_step
from tinydit_ray.measure_training import MeasurementError, TrainedCell
from tinydit_ray.record import update
from tinydit_ray.train import trainer_of

STEADY_STEPS = 2  # the last of the warm-up, timed to tell the compile time from the first step
CONTROL_WARMUP_STEPS = 3  # eager, and its kernels are warm from the cell's own steps
TRAINING_SHARE = 0.8  # of the trial's time that is left; the scores need the rest


class Measurement(TrainedCell):
    """One cell in one process. The methods are called once each: those of ``TrainedCell`` and these, in the order of
    ``cell.py``."""

    def first_step(self) -> None:
        """First step apart (it compiles), warm-up, then the peak memory of the cell alone."""
        start = time.perf_counter()
        self.trainer.train_step(self.batches[0])
        self._synchronize()
        first_s = time.perf_counter() - start
        warm_up(self.trainer.train_step, self.batches, WARMUP_STEPS - STEADY_STEPS)
        steady = self._steady_step_s()
        counts = compile_counts()
        worst = self._highest(
            first_step_s=first_s,
            compile_s=max(0.0, first_s - steady),
            peak_rss_mb=memory.peak_rss_mb(),
            peak_device_mb=memory.peak_device_mb(self.cell.device),
        )
        update(self.record, {**worst, "compile_cache": counts.cache})

    def _steady_step_s(self) -> float:
        start, faults = time.perf_counter(), memory.page_faults()
        warm_up(self.trainer.train_step, self.batches, STEADY_STEPS)
        self._synchronize()
        update(self.record, {"page_faults_per_step": (memory.page_faults() - faults) / STEADY_STEPS})
        return (time.perf_counter() - start) / STEADY_STEPS

    def check(self) -> None:
        """Correct before fast: raises MeasurementError where the cell computes something else."""
        self.trainer.restart(self.weights)
        self.control = trainer_of(self.task.control_cell, group=self.group)
        reference = reference_of(self.cell)
        same = reference == self.task.control_cell and self.group.size == 1
        plain = self.control if same else Averaged(trainer_of(reference), self.group)
        found = compare(self.trainer, plain, self.batches[0], self.cell.precision)
        print(f"agreement with {reference.config_id}: {found}", flush=True)
        if not found.ok:
            raise MeasurementError(f"not correct: {found.problem}")
        warm_up(self.control.train_step, self.batches, CONTROL_WARMUP_STEPS)

    def time(self) -> None:
        """The timed window, and a traced step right after it. Inside, compiled code may neither be compiled
        again nor fall back to eager (both raise), so what the trace sees is what ran in the window."""
        counts = compile_counts()
        with watch_gpu(self.cell.device) as gpu, watch_load() as load_window, no_recompiles():
            window = self._window()
            traced = trace_step(self.trainer, self.batches[0])
        self._note_effective(traced, counts, compile_counts())
        self._note_speed(window, load_window)
        self._note_gpu(gpu)

    def _window(self) -> Window:
        return self._pairs(self.trainer.train_step, self.control.train_step, self.batches)

    def _pairs(self, cell: Step, control: Step, inputs: Sequence[Any]) -> Window:
        watch: Stopwatch = CudaStopwatch() if self.cell.device == "cuda" else HostStopwatch()
        if self.group.size > 1:
            watch = GroupStopwatch(watch, self.group.align, self.group.highest)
        target = self.task.ci

        def precise(window: Window) -> bool:
            return stats.ci_reached(stats.abba_ratios(window.cell_ms, window.control_ms), target)

        return time_pairs(
            cell, control, inputs, seconds=self.task.seconds, stopwatch=watch,
            precise=precise if target else None, limit_s=self._time_left(),
            check_every=8 if self.cell.device == "cpu" else 32, agree=self.group.agree,
        )  # fmt: skip

    def _time_left(self) -> float:
        """Seconds that the window may take in all under ``--ci``: half of what the time limit leaves."""
        spent = sum(self.phases.seconds.values())
        limit = self.task.timeout_s or 600.0
        return max(self.task.seconds, (limit - spent) / 2)

    def _note_speed(self, window: Window, load: LoadWindow) -> None:
        cell, control = stats.summarise(window.cell_ms), stats.summarise(window.control_ms)
        gflops = model_gflops_per_step(self.cell)
        tflops = None if gflops is None else stats.tflops_per_s(gflops, cell.ms_per_step)
        peak, source = peak_tflops(self.cell.precision, self.cell.device)
        peak = None if peak is None else peak * self.group.size
        bandwidth = measure_gbytes_per_s(self.cell.device)
        update(
            self.record,
            {
                "ms_per_step": cell.ms_per_step,
                "ms_per_step_iqr": cell.iqr,
                "ms_per_step_p10": cell.p10,
                "ms_per_step_p90": cell.p90,
                "timed_steps": cell.n,
                "control_ms_per_step": control.ms_per_step,
                "images_per_s": stats.images_per_s(cell.ms_per_step, self.cell.batch_size),
                "model_gflops_per_step": gflops,
                "tflops_per_s": tflops,
                "peak_tflops": peak,
                "peak_source": source,
                "model_gbytes_per_step": gbytes_per_step(self.cell),
                "memory_gbytes_per_s": None if bandwidth is None else bandwidth * self.group.size,
                "mfu": None if tflops is None else stats.mfu(tflops, peak),
                "break_even_steps": stats.break_even_steps(
                    self.record["compile_s"], cell.ms_per_step, control.ms_per_step
                ),
            },
        )
        self._note_pairs(window, load, unit="training step")

    def is_to_be_trained(self) -> bool:
        """Not where the steps just timed say that the training would outlast the trial, or its share of a budget:
        a time limit in the middle of it would take the timing along, and the cells that come after."""
        if not super().is_to_be_trained():
            return False
        if not self.record["ms_per_step"]:  # its sampler was timed, and nobody knows
            return True
        needed = self.task.train_steps * self.record["ms_per_step"] / 1e3
        limits = [self.task.train_limit_s] if self.task.train_limit_s else []
        if self.task.timeout_s:
            limits.append(TRAINING_SHARE * (self.task.timeout_s - sum(self.phases.seconds.values())))
        if needed <= min(limits, default=needed):
            return True
        self.flags.append("not-trained")
        reason = (
            f"not trained: {self.task.train_steps} steps would take {needed:.0f} s, it has {min(limits):.0f} s for"
            " them (--budget, --cell-timeout, --steps)"
        )
        update(self.record, {"flags": ",".join(self.flags), "reason": reason})
        return False

    def _note_gpu(self, gpu: GpuWindow) -> None:
        self.flags += gpu.flags
        facts = {"foreign_gpu_processes": gpu.foreign_processes, "gpu_throttle": gpu.throttle}
        update(self.record, {**facts, "flags": ",".join(self.flags)})

    def _note_pairs(self, window: Window, load: LoadWindow, *, unit: str) -> None:
        """What is the same whatever a block is: the paired comparison, the load, the raw times."""
        speedup = stats.round_speedup(stats.abba_ratios(window.cell_ms, window.control_ms))
        load = load.without(self.group.objects(load.own()))
        update(
            self.record,
            {
                "speedup_vs_control": speedup.value,
                "speedup_ci_low": speedup.ci_low,
                "speedup_ci_high": speedup.ci_high,
                "window_s": window.seconds,
                "foreign_cpu_pct": load.foreign_pct,
                "ray_cpu_s": load.ray_cpu_s,
            },
        )
        self._flag_timing(window, load.foreign_pct)
        steps = {"cell_ms": window.cell_ms, "control_ms": window.control_ms, "order": "A B B A", "unit": unit}
        (self.folder / "steps.json").write_text(json.dumps(steps))

    def _flag_timing(self, window: Window, foreign_pct: float | None) -> None:
        flags = {
            "few-steps": window.quads <= MIN_QUADS,
            "foreign-load": foreign_pct is not None and foreign_pct > FOREIGN_LOAD_PCT,
            "concurrent": self.task.concurrent > 1,
            "ci-reached": window.reached is True,
            "ci-not-reached": window.reached is False,
            "nice": self.record["effective.nice"] != 0,
            "host-sync": bool(self.record["effective.host_syncs"]),
        }
        self.flags += [name for name, raised in flags.items() if raised]
        update(self.record, {"flags": ",".join(self.flags)})

    def explain(self) -> None:
        """``explain.txt``, at the end: it resets the compiler. What goes wrong there is in the file and the log,
        and does not undo what was measured."""
        try:
            text = explain_text(self.cell, self.trainer, self.batches[0])
        except Exception as error:
            traceback.print_exc()
            text = f"torch._dynamo.explain failed: {error}\n"
        (self.folder / EXPLAIN_FILE).write_text(text)
