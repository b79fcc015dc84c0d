"""One training run: resume, train, evaluate along the way, save, score.

Nothing that decides the weights lives outside the checkpoint: batches follow from (seed, step), so a run that
was interrupted ends in the very weights of one that was not (same device and threads).
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from tinydit_ray.config import AXES
from tinydit_ray.data import BatchStream, DataSpec, ImageSet, cache_folder
from tinydit_ray.network import checkpoint_config, plain_network
from tinydit_ray.quality import (
    Probe,
    Reference,
    fixed_noise,
    probe_for,
    reference_for,
    sample_images,
    save_grid,
    score_model,
    to_uint8,
    velocity_mse,
)
from tinydit_ray.train.ema import Ema
from tinydit_ray.train.fast import trainer_of
from tinydit_ray.train.files import RunFolder
from tinydit_ray.train.history import History
from tinydit_ray.train.interrupt import Stop
from tinydit_ray.train.options import TrainError, TrainOptions
from tinydit_ray.train.progress import Screen
from tinydit_ray.train.report import metrics
from tinydit_ray.train.trainer import Diverged

LOG_EVERY = 10
SCORED_IMAGES = 2000  # velocity MSE is of the first 2,000 test images
STRIP_COLUMNS = 8
# Axes that do not decide which run this is: the same run may go on with other threads.
MACHINE_AXES = ("cpus_per_worker", "gpus_per_worker")


class Training:
    """A run in its folder. ``resume``, ``train`` and ``score`` are called in this order."""

    def __init__(
        self, options: TrainOptions, spec: DataSpec, train: ImageSet, test: ImageSet, folder: RunFolder, screen: Screen
    ) -> None:
        self.options, self.cell, self.spec, self.folder, self.screen = options, options.cell, spec, folder, screen
        self.test, self.scored_images = test, test.images[:SCORED_IMAGES]
        self.stream = BatchStream(train.images, self.cell.batch_size, seed=self.cell.seed, device=self.cell.device)
        self.trainer = trainer_of(self.cell)
        self.model: Any = self.trainer.model
        self.ema = None if options.ema is None else Ema(self.model, options.ema)
        self.history = History()
        self.saved: tuple[int, int] | None = None  # ``_mark`` of the newest checkpoint
        self.refused = 0  # skipped steps up to the last one that was taken
        self.fresh = True  # the next step is this session's first

    @property
    def steps(self) -> int:
        return self.trainer.steps

    def identity(self) -> dict[str, Any]:
        """What makes it this run and no other; a checkpoint of another identity is refused."""
        axes = {name: value for name, value in self.cell.asdict().items() if name not in MACHINE_AXES}
        data = {"source": self.spec.source, "data": self.spec.digest, "classes": list(self.spec.classes)}
        return {**axes, **data, "ema": "off" if self.options.ema is None else self.options.ema}

    def resume(self) -> None:
        """Take over the newest whole checkpoint, if there is one. Raises TrainError where it is another run's."""
        path, state, note = self.folder.newest()
        if path is None:
            return
        self._check_same(path.name, state)
        if note:
            self.screen.say(f"WARNING: {note} (step {state['steps']})")
        threads = state.get("threads")
        if threads != self.cell.cpus_per_worker:
            self.screen.say(f"note: {threads} CPU threads until here; with other threads sums round otherwise")
        self.trainer.load(path)
        self.stream.load_state_dict(state["stream"])
        self.history = History.from_state(state["history"], self.cell.device)
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.refused, self.saved = self.trainer.skipped_steps, self._mark()

    def _check_same(self, name: str, state: dict[str, Any]) -> None:
        saved = state.get("identity")
        if saved is None:
            raise TrainError(f"{self.folder.path / name} is not a checkpoint of this command; choose another --out")
        other = [
            f"{key} {old!r} there, {value!r} asked"
            for key, value in self.identity().items()
            if (old := saved.get(key, AXES[key].default if key in AXES else None)) != value
        ]
        if other:
            raise TrainError(f"{self.folder.path}: its checkpoint is of another run: {'; '.join(other)}")
        if state["steps"] > self.options.steps:
            raise TrainError(
                f"{self.folder.path}: its checkpoint is at step {state['steps']} already; --steps"
                f" {self.options.steps} asks for fewer"
            )

    def train(self, stop: Stop) -> bool:
        """Train to the last step: True; or until asked to stop: False. Either way the checkpoint is written."""
        self.history.sessions += self.steps < self.options.steps
        while not stop.asked:
            if self._evaluation_is_due():
                self._evaluate(stop)
                continue
            if self.steps >= self.options.steps:
                break
            self._step()
            if self.steps % self.options.save_every == 0:
                self.save()
        if self._mark() != self.saved:
            self.save()
        return not stop.asked

    def _mark(self) -> tuple[int, int]:
        """Changes with everything that a checkpoint would hold and the one before does not."""
        return self.trainer.steps, len(self.history.velocity_mse)

    def _step(self) -> None:
        """One iteration, timed; the device is waited for only where a number is read."""
        start = time.perf_counter()
        batch = next(self.stream)
        batch_s = time.perf_counter() - start
        before = self.steps
        loss = self.trainer.train_step(batch)
        taken = self.steps > before
        if taken:
            self.history.losses.append(loss)
            if self.ema is not None:
                self.ema.update()
        log = taken and self._is_due(LOG_EVERY)
        if self.fresh or log or self._is_due(self.options.save_every) or self._is_due(self.options.eval_every):
            self._synchronize()
        self.history.count(time.perf_counter() - start, batch_s, first=self.fresh)
        self.fresh = False
        self._check_progress(taken)
        if log:
            self._log()
        self.screen.step(self.steps)

    def _is_due(self, every: int) -> bool:
        return self.steps % every == 0 or self.steps == self.options.steps

    def _log(self) -> None:
        loss = self.history.log(self.steps)
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} after {self.steps} steps")
        ms = self.history.step_ms[-1] if self.history.step_ms else None
        self.screen.log(self.steps, loss, ms, self._left_s(ms))

    def _left_s(self, ms: float | None) -> float | None:
        """Seconds left to train and evaluate at the present pace."""
        if ms is None:
            return None
        left = self.options.steps - self.steps
        evaluation_s = self.history.eval_s / max(1, len(self.history.velocity_mse))
        return left * ms / 1e3 + left / self.options.eval_every * evaluation_s

    def _check_progress(self, taken: bool) -> None:
        if taken:
            self.refused = self.trainer.skipped_steps
        else:
            self.trainer.check_progress(self.refused)

    def _synchronize(self) -> None:
        if self.cell.device == "cuda":
            torch.cuda.synchronize()

    def _evaluation_is_due(self) -> bool:
        return self._is_due(self.options.eval_every) and self.history.evaluated_at != self.steps

    def _evaluate(self, stop: Stop) -> None:
        """Velocity MSE and a row of the strip; interrupted, nothing of it is kept and it is made up for later."""
        start = time.perf_counter()
        try:
            with stop.at_once():
                raw = velocity_mse(self._plain(), self.scored_images)
                averaged = None if self.ema is None else velocity_mse(self._plain(averaged=True), self.scored_images)
                row = to_uint8(self._sample(self._plain(averaged=self.ema is not None), STRIP_COLUMNS))
        except KeyboardInterrupt:
            return
        except ValueError as error:  # images that are not numbers
            raise Diverged(f"the model's images at step {self.steps} are not finite ({error})") from None
        if not math.isfinite(raw):
            raise Diverged(f"the velocity MSE is {raw} after {self.steps} steps")
        self.history.velocity_mse.append([self.steps, raw])
        if averaged is not None:
            self.history.velocity_mse_ema.append([self.steps, averaged])
        self.history.strip_steps.append(self.steps)
        self.history.strip_images.append(row)
        self.history.eval_s += time.perf_counter() - start
        self._show()
        also = "" if averaged is None else f", of averaged weights {averaged:.4f}"
        self.screen.say(f"step {self.steps}: velocity MSE {raw:.4f}{also}")

    def _show(self) -> None:
        """The files a person may look at while it trains."""
        save_grid(self.history.strip()[1], self.folder.path / "strip.png", nrow=STRIP_COLUMNS)
        self.folder.write_metrics(metrics(self, "training"))

    def _plain(self, *, averaged: bool = False) -> Any:
        return plain_network(self.cell, self.model, self.ema.weights if averaged and self.ema is not None else None)

    def _sample(self, model: Any, n: int) -> torch.Tensor:
        return sample_images(model, fixed_noise(n), sampler=self.options.sampler, steps=self.options.sample_steps)

    def save(self) -> None:
        """Write a checkpoint. Raises Diverged instead where a weight is not finite: the last good one stays."""
        if not all(bool(torch.isfinite(tensor).all()) for tensor in self.model.state_dict().values()):
            raise Diverged(f"weights are not finite after {self.steps} steps")
        self.folder.save(
            self.trainer,
            checkpoint_config(self.cell, self.model),
            identity=self.identity(),
            threads=self.cell.cpus_per_worker,
            stream=self.stream.state_dict(),
            history=self.history.state_dict(),
            ema=None if self.ema is None else self.ema.state_dict(),
        )
        self.saved = self._mark()

    def score(self) -> dict[str, Any]:
        """samples.png and probe-FD of the trained weights, and of the averaged ones."""
        judge = None
        if self.options.fd_n:
            probe = probe_for(self.test.source)
            judge = probe, reference_for(probe, self.test, cache_folder() / "probe_stats")
        try:
            scores = self._score(self._plain(), "", judge)
            if self.ema is not None:
                scores |= self._score(self._plain(averaged=True), "_ema", judge)
        except ValueError as error:  # images that are not numbers
            raise Diverged(f"images of the trained model are not finite ({error})") from None
        return scores

    def _score(self, model: Any, suffix: str, judge: tuple[Probe, Reference] | None) -> dict[str, Any]:
        n, shown, what = self.options.fd_n, self.options.samples, "averaged weights" if suffix else "trained weights"
        path = self.folder.path / f"samples{suffix}.png"
        if n < shown:
            save_grid(self._sample(model, shown), path)
        if judge is None:
            return {}
        self.screen.say(f"probe-FD of {what}: sampling {n:,} images ({self._sampling()}) …")
        found = score_model(
            model, *judge, n=n, sampler=self.options.sampler, steps=self.options.sample_steps, shown=shown
        )
        if n >= shown:
            save_grid(found["images"], path)
        self.screen.say(f"probe-FD of {what}: {found['probe_fd']:.2f} (not FID)")
        names = {"probe_fd": f"probe_fd{suffix}", "class_counts": f"class_counts{suffix}"}
        same = {"probe_fd_n": "probe_fd_n", "probe_id": "probe_id", "flags": "probe_fd_flags"}
        return {name: found[key] for key, name in (names | same).items()}

    def _sampling(self) -> str:
        return f"{self.options.sampler}, {self.options.sample_steps} steps"
