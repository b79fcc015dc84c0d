"""One cell trained for a budget of seconds or steps, scored along the way: what quality it reaches, and when.

``train_wall_s`` is spent in steps, the first one with its compile included, and stands still while scores are
taken. ``ms_per_step`` is the pace of that training, batches included: there is no control beside it, and
speed grids tell speeds better.
"""

from __future__ import annotations

import csv
import math
import time
from typing import Any

from torch import Tensor

from tinydit_ray import data
from tinydit_ray.bench import memory, stats
from tinydit_ray.bench.effective import compile_counts
from tinydit_ray.bench.tradeoff import time_to_quality
from tinydit_ray.measure_training import LOG_EVERY, TrainedCell
from tinydit_ray.model import TinyDiT
from tinydit_ray.network import plain_network
from tinydit_ray.quality import fixed_noise, sample_images, save_grid, to_uint8
from tinydit_ray.record import update
from tinydit_ray.train.ema import Ema
from tinydit_ray.train.history import History
from tinydit_ray.train.trainer import Diverged

# Parts of the budget at which scores are taken: closer together while quality changes fast.
SCORED_AT = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)
STRIP_COLUMNS = 8
CURVE_FILE, STRIP_FILE = "quality.csv", "strip.png"


class QualityRun(TrainedCell):
    """``train`` goes through the budget and scores on its way; ``score`` adds the probe-FD at the end."""

    def train(self) -> None:
        self.stream = self._stream()
        self.ema = Ema(self.trainer.model, self.task.ema) if self.task.ema else None
        self.history = History()
        self.test = data.load(self.spec, "test")
        self.curve: list[list[float]] = []  # step, seconds, velocity MSE[, of the averaged weights]
        self.refused = 0
        try:
            self._score_now()
            for part in SCORED_AT:
                self._train_until(part)
        finally:
            if self.history.losses:  # those after the last entry
                self.history.log(self.trainer.steps)
                update(self.record, {"train_loss_last": self.history.loss[-1][1]})
            self._write_loss([(int(step), loss, seconds) for step, loss, seconds in self.history.loss])

    def _train_until(self, part: float) -> None:
        """To that part of the budget, and a point of the curve there; a report there may end the trial."""
        while self._spent() < part:
            self._step()
        self._synchronize()
        if self.trainer.steps == self.curve[-1][0]:  # a short budget: one step went past several parts
            return
        self._score_now()
        if self.report and self._spent() < 1:
            self.report(self.record, self.progress())

    def progress(self) -> float:
        """Seconds trained, or steps where the budget is one of steps: what an early stop compares at."""
        return self.history.train_s if self.task.train_s else float(self.trainer.steps)

    def _spent(self) -> float:
        """Part of the budget that is used up; with both budgets, of the one that ends first."""
        seconds = self.history.train_s / self.task.train_s if self.task.train_s else 0.0
        return max(seconds, self.trainer.steps / self.task.train_steps if self.task.train_steps else 0.0)

    def _step(self) -> None:
        """One iteration. The device is waited for only where a number is read."""
        start = time.perf_counter()
        first, before = not self.history.iterations, self.trainer.steps
        batch = next(self.stream)
        batch_s = time.perf_counter() - start
        loss = self.trainer.train_step(batch)
        taken = self.trainer.steps > before
        if taken:
            self.refused = self.trainer.skipped_steps
            self.history.losses.append(loss)
            if self.ema is not None:
                self.ema.update()
        log = taken and self.trainer.steps % LOG_EVERY == 0
        if first or log:
            self._synchronize()
        self.history.count(time.perf_counter() - start, batch_s, first=first)
        self.trainer.check_progress(self.refused)
        if log and not math.isfinite(mean := self.history.log(self.trainer.steps)):
            raise Diverged(f"the loss is {mean} after {self.trainer.steps} steps")

    def _score_now(self) -> None:
        """A point of the curve, a row of the strip, and the record as if training ended here."""
        plain = self._plain()
        point = [self.trainer.steps, self.history.train_s, self._velocity_mse(plain, self.test)]
        if self.ema is not None:
            point.append(self._velocity_mse(self._plain(averaged=True), self.test))
        self.curve.append(point)
        self.history.strip_steps.append(self.trainer.steps)
        self.history.strip_images.append(self._row(plain))
        self._note_so_far()
        self._write_so_far()

    def _plain(self, *, averaged: bool = False) -> Any:
        weights = self.ema.weights if averaged and self.ema is not None else None
        return plain_network(self.cell, self.trainer.model, weights)

    def _row(self, plain: TinyDiT) -> Tensor:
        """Images of the same noise at each moment."""
        try:
            return to_uint8(sample_images(plain, fixed_noise(STRIP_COLUMNS)))
        except ValueError as error:  # images that are not numbers
            raise Diverged(f"images at step {self.trainer.steps} are not finite ({error})") from None

    def _note_so_far(self) -> None:
        history, ms = self.history, self.history.ms_per_step
        first_s = history.first_step_s or None
        found = {
            "velocity_mse": self.curve[-1][2],
            "velocity_mse_ema": self.curve[-1][3] if self.ema is not None else None,
            "ema_decay": self.task.ema or None,
            "time_to_quality_s": time_to_quality([(point[1], point[2]) for point in self.curve], self.task.target),
            "steps_trained": self.trainer.steps,
            "skipped_optimizer_steps": self.trainer.skipped_steps,
            "train_wall_s": history.train_s,
            "train_loss_last": history.loss[-1][1] if history.loss else None,
            "ms_per_step": ms,
            "images_per_s": stats.images_per_s(ms, self.cell.batch_size) if ms else None,
            "batch_ms": 1e3 * history.batch_s / history.iterations if history.iterations else None,
            "first_step_s": first_s,
            "compile_s": max(0.0, first_s - ms / 1e3) if first_s and ms else None,
            "compile_cache": compile_counts().cache,
            "peak_rss_mb": memory.peak_rss_mb(),
            "peak_device_mb": memory.peak_device_mb(self.cell.device),
        }
        update(self.record, found)

    def _write_so_far(self) -> None:
        names = ["step", "seconds", "velocity_mse", "velocity_mse_ema"][: len(self.curve[-1])]
        with open(self.folder / CURVE_FILE, "w", newline="") as file:
            csv.writer(file).writerows([names, *self.curve])
        save_grid(self.history.strip()[1], self.folder / STRIP_FILE, nrow=STRIP_COLUMNS)

    def _score(self, plain: TinyDiT, test: data.ImageSet, suffix: str) -> None:
        """The velocity MSE is the curve's last point."""
        if self.task.fd_images:
            self._score_samples(plain, test, suffix)
