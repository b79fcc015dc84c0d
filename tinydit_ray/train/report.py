"""metrics.json: everything one run says of itself, under the names that records of sweeps use."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tinydit_ray.bench import stats
from tinydit_ray.bench.machine import node_kind, versions
from tinydit_ray.quality import NOT_FID
from tinydit_ray.record import SCHEMA_VERSION

if TYPE_CHECKING:
    from tinydit_ray.train.run import Training


def metrics(run: Training, status: str, scores: dict[str, Any] | None = None, reason: str = "") -> dict[str, Any]:
    """The content of metrics.json. ``status`` is training, complete or diverged; scores exist when complete."""
    return {
        "schema_version": SCHEMA_VERSION,
        "status": status,
        "reason": reason,
        "command": run.options.command,
        **_configuration(run),
        **_curves(run),
        **_speed(run),
        **_quality(run, scores or {}),
    }


@lru_cache
def _versions() -> dict[str, str]:
    """Of this process: they are asked for at every evaluation."""
    return versions()


def _configuration(run: Training) -> dict[str, Any]:
    return {
        "steps": run.options.steps,
        "config": {**run.cell.asdict(), "model": run.cell.model},
        "config_id": run.cell.config_id,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "ema_decay": run.options.ema,
        "data_source": run.test.source,
        "data_digest": run.spec.digest,
        "data_classes": list(run.spec.classes),
        "product_version": metadata.version("tinydit-ray"),
        "versions": _versions(),
        "node_kind": node_kind(run.cell.device),
        "threads": run.cell.cpus_per_worker,
    }


def _curves(run: Training) -> dict[str, Any]:
    """Losses are means since the entry before; seconds are those spent in training steps."""
    history = run.history
    return {
        "loss_curve": [[step, _finite(loss), seconds] for step, loss, seconds in history.loss],
        "loss_curve_columns": ["step", "loss", "seconds"],
        "velocity_mse_curve": history.velocity_mse,
        "velocity_mse_ema_curve": history.velocity_mse_ema,
        "strip_steps": history.strip()[0] if history.strip_steps else [],
    }


def _speed(run: Training) -> dict[str, Any]:
    """ms_per_step: a whole iteration, its batch included; not the timed window of a sweep."""
    history, ms = run.history, run.history.ms_per_step
    return {
        "ms_per_step": ms,
        "images_per_s": stats.images_per_s(ms, run.cell.batch_size) if ms else None,
        "batch_ms": 1e3 * history.batch_s / history.iterations if history.iterations else None,
        "first_step_s": history.first_step_s or None,
        "train_wall_s": history.train_s,
        "eval_wall_s": history.eval_s,
        "sessions": history.sessions,
        "steps_trained": run.steps,
        "skipped_optimizer_steps": run.trainer.skipped_steps,
    }


def _quality(run: Training, scores: dict[str, Any]) -> dict[str, Any]:
    history = run.history
    return {
        "train_loss_last": _finite(history.loss[-1][1]) if history.loss else None,
        "velocity_mse": history.velocity_mse[-1][1] if history.velocity_mse else None,
        "velocity_mse_n": len(run.scored_images),
        "velocity_mse_ema": history.velocity_mse_ema[-1][1] if history.velocity_mse_ema else None,
        **dict.fromkeys(("probe_fd", "probe_fd_ema", "probe_fd_n", "probe_id", "class_counts")),
        **scores,
        "scoring": run.options.scoring,
        "note": NOT_FID,
    }


def _finite(value: float) -> float | None:
    """JSON has no word for what is not a number."""
    return value if math.isfinite(value) else None
