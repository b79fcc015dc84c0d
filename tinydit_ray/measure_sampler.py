"""Measuring a cell by its sampler: the same steps as for training, with one whole image batch as the block.

The paired control samples from the same weights, eager and in fp32. Training is the same for every cell, so
what differs in the scores comes from the sampler alone.
"""

from __future__ import annotations

import time
from typing import cast

import torch
from torch import Tensor

from tinydit_ray import data
from tinydit_ray.bench import memory, stats
from tinydit_ray.bench.agreement import reference_of, relative_error
from tinydit_ray.bench.effective import compile_counts, dtype_name, no_recompiles, trace_ops
from tinydit_ray.bench.gpu import watch_gpu
from tinydit_ray.bench.load import LoadWindow, watch_load
from tinydit_ray.bench.timing import Window, warm_up
from tinydit_ray.config import CellConfig
from tinydit_ray.data import cache_folder
from tinydit_ray.measure import STEADY_STEPS, Measurement
from tinydit_ray.measure_training import SCORED_IMAGES, MeasurementError
from tinydit_ray.model import TinyDiT
from tinydit_ray.quality import probe_for, probe_scores, reference_for, save_grid
from tinydit_ray.quality.grid import to_uint8
from tinydit_ray.quality.scores import fixed_noise
from tinydit_ray.quality.velocity import velocity_error
from tinydit_ray.record import update
from tinydit_ray.sampler import SAMPLE_STEPS, Sampler
from tinydit_ray.train import trainer_of

SAMPLED_IMAGES = {"cpu": 25, "cuda": 250}  # in one block; they divide the numbers of images that are scored
NOISES = 4  # fixed noises that blocks go round
WARMUP_BLOCKS = 3
# Relative L2 error of a velocity against the eager fp32 net: four times what was seen at 128/4/4 (bf16 8e-3,
# int8 9e-3), and for fp32 forms (5e-7 seen) as for gradients in bench/agreement.py.
TOLERANCES = {"eager": 1e-4, "compiled": 1e-4, "bf16": 3e-2, "int8": 4e-2}
SHOWN = 64


class SamplerMeasurement(Measurement):
    """One cell in one process, timed by its sampler."""

    def first_step(self) -> None:
        """First block apart (it compiles), warm-up, then the peak memory of the cell alone."""
        self.sampler = self._sampler()
        images = SAMPLED_IMAGES[self.cell.device]
        self.noises = list(fixed_noise(NOISES * images, self.cell.seed).to(self.cell.device).split(images))
        start = time.perf_counter()
        self.sampler.sample(self.noises[0])
        self._synchronize()
        first_s = time.perf_counter() - start
        warm_up(self.sampler.sample, self.noises, WARMUP_BLOCKS - STEADY_STEPS)
        start = time.perf_counter()
        warm_up(self.sampler.sample, self.noises, STEADY_STEPS)
        self._synchronize()
        steady = (time.perf_counter() - start) / STEADY_STEPS
        found = {
            "first_step_s": first_s,
            "compile_s": max(0.0, first_s - steady),
            "compile_cache": compile_counts().cache,
            "peak_rss_mb": memory.peak_rss_mb(),
            "peak_device_mb": memory.peak_device_mb(self.cell.device),
        }
        update(self.record, found)

    def _sampler(self) -> Sampler:
        """The cell's sampler of the weights as they are now."""
        return Sampler(cast(TinyDiT, self.trainer.model), self.cell.sampler)

    def check(self) -> None:
        """Raises MeasurementError where a velocity is not that of the plain net with the same weights."""
        reference = self._sampler_from(reference_of(self.cell))
        t = torch.linspace(0, 1, len(self.noises[0]), device=self.cell.device)
        error = relative_error(self.sampler.velocity(self.noises[0], t), reference.velocity(self.noises[0], t))
        limit = TOLERANCES[self.cell.sampler]
        print(f"velocity differs from the plain net's by {error:.2g} (relative L2); {limit:g} is allowed", flush=True)
        if not error <= limit:
            raise MeasurementError(f"not correct: velocity differs by {error:.2g} (L2), more than {limit:g}")
        self.control_sampler = self._sampler_from(self.task.control_cell)
        warm_up(self.control_sampler.sample, self.noises, STEADY_STEPS)

    def _sampler_from(self, cell: CellConfig) -> Sampler:
        """Another cell's sampler, from the seeded weights."""
        return Sampler(cast(TinyDiT, trainer_of(cell).model), cell.sampler)

    def time(self) -> None:
        counts = compile_counts()
        with watch_gpu(self.cell.device) as gpu, watch_load() as load_window, no_recompiles():
            window = self._pairs(self.sampler.sample, self.control_sampler.sample, self.noises)
            ops = trace_ops(lambda: self.sampler.sample(self.noises[0]), self.cell.device == "cuda")
        self._note_sampling(window, load_window)
        self._note_gpu(gpu)
        compiled = "recompiled" if counts != compile_counts() else "yes" if ops.compiled_regions else "no"
        facts = {
            "effective.attention_op": ops.attention_op,
            "effective.matmul_dtype": "int8" if ops.int8_matmuls else dtype_name(self._dtype_inside()),
            "effective.compiled_in_window": compiled,
            "effective.graphs": compile_counts().graphs,
            "effective.graph_breaks": compile_counts().graph_breaks,
            "effective.recompiles": compile_counts().recompiles,
        }
        update(self.record, facts)

    def _dtype_inside(self) -> torch.dtype:
        """Of the net's own output, before it is made fp32."""
        with torch.no_grad():
            x, t = self.noises[0], torch.zeros(len(self.noises[0]), device=self.cell.device)
            return self.sampler.net(x.to(self.sampler.dtype), t).dtype

    def _note_sampling(self, window: Window, load: LoadWindow) -> None:
        images = SAMPLED_IMAGES[self.cell.device]
        cell, control = stats.summarise(window.cell_ms), stats.summarise(window.control_ms)
        sampling = {
            "sample_ms_per_image": cell.ms_per_step / images,
            "control_sample_ms_per_image": control.ms_per_step / images,
            "timed_steps": cell.n,
        }
        update(self.record, sampling)
        self._note_pairs(window, load, unit=f"{images} images in {SAMPLE_STEPS} Euler steps")

    def judge_effective(self) -> None:
        """Raises MeasurementError where what sampled is not what was asked."""
        seen, form = self.record, self.cell.sampler
        dtype = {"bf16": "bfloat16", "int8": "int8"}.get(form, "float32")
        compiled = "yes" if form == "compiled" else "no"
        checks = (
            ("sampler dtype", dtype, seen["effective.matmul_dtype"]),
            ("sampler compiled", compiled, seen["effective.compiled_in_window"]),
            ("threads", self.cell.cpus_per_worker, seen["effective.threads"]),
            ("fresh process", "yes", seen["effective.fresh_process"]),
        )
        wrong = [f"{name}: asked {asked}, ran {ran}" for name, asked, ran in checks if asked != ran]
        if wrong:
            raise MeasurementError("ran as something else: " + "; ".join(wrong))

    def score(self) -> None:
        """As for training, and the velocity MSE of the net that samples, as it samples."""
        super().score()
        images = data.load(self.spec, "test").images[:SCORED_IMAGES]
        device = self.cell.device
        mse = velocity_error(self._sampler().velocity, images, device=device, batch_size=SAMPLED_IMAGES[device])
        update(self.record, {"sample_velocity_mse": mse})

    def _score_samples(self, plain: TinyDiT, test: data.ImageSet, suffix: str) -> None:
        """probe-FD of images that the cell's own sampler made."""
        probe = probe_for(test.source)
        reference = reference_for(probe, test, cache_folder() / "statistics")
        images = self._sampled(Sampler(plain, self.cell.sampler) if suffix else self._sampler(), self.task.fd_images)
        save_grid(to_uint8(images[:SHOWN]), self.folder / f"samples{suffix}.png")
        self._note_samples(probe_scores(probe, images, reference), suffix)

    def _sampled(self, sampler: Sampler, n: int) -> Tensor:
        parts = fixed_noise(n).split(SAMPLED_IMAGES[self.cell.device])
        return torch.cat([sampler.sample(part.to(self.cell.device)).cpu() for part in parts])
