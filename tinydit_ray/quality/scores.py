"""probe-FD: how far generated images are from real ones, as a small classifier sees them. Not FID.

Fréchet distance between features of n images and of the real test images. Its numbers mean something only
beside others of the same ``probe_id``, the same n, and the anchors (real training images, pure noise).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tinydit_ray.atomic import replacing
from tinydit_ray.flow import euler_sample, heun_sample
from tinydit_ray.quality.classifier import Probe, image_stats, load_probe, probe_features
from tinydit_ray.quality.frechet import FeatureStats, feature_stats, frechet_distance, score_flags
from tinydit_ray.quality.grid import to_uint8
from tinydit_ray.quality.precision import VelocityModel, evaluating

if TYPE_CHECKING:
    from tinydit_ray.data import ImageSet

SAMPLERS: dict[str, Callable[..., Tensor]] = {"euler": euler_sample, "heun": heun_sample}
NOT_FID = "probe-FD uses a small classifier's features: it is not FID; compare within one probe_id and n"


@dataclass(frozen=True)
class Reference:
    """Feature statistics of the real images that a distance is taken to, and the id that names them."""

    stats: FeatureStats
    probe_id: str


def probe_for(source: str) -> Probe:
    """The shipped probe for data of a source's name: ``shapes`` has its own, all else is CIFAR-10's."""
    return load_probe("shapes" if source == "shapes" else "cifar10")


def reference_for(probe: Probe, test: ImageSet, cache: str | Path | None = None) -> Reference:
    """Statistics of a test split under a probe, and the probe_id that names both.

    The shipped statistics serve where they are of the very same images; of other data (a class subset, an
    image folder, another decoder) they are computed, 7 s for 10,000 images on two free cores, and kept in
    the folder ``cache`` when one is given.
    """
    probe_id = probe.id_for(test.digest)
    if test.digest == probe.data_digest:
        return Reference(probe.stats, probe_id)
    path = None if cache is None else Path(cache) / f"{probe_id}.safetensors"
    stats = None if path is None else _read_stats(path)
    if stats is None:
        stats = image_stats(probe, test.images)
        if path is not None:
            _write_stats(stats, path)
    return Reference(stats, probe_id)


def comparable(probe_ids: Iterable[str]) -> bool:
    """Whether scores with these ids may stand in one ranking: all present, all the same probe and data."""
    ids = set(probe_ids)
    return len(ids) == 1 and all(ids)


def probe_scores(
    probe: Probe, images: Tensor, real_feats: Tensor | FeatureStats | Reference, *, batch_size: int = 250
) -> dict[str, Any]:
    """``probe_fd`` of images (N, 3, 32, 32) against real features (M, F) or their statistics.

    Beside it: ``probe_fd_n``, ``probe_id`` (where a Reference names it, else ""), ``class_counts`` (how many
    images the probe takes for each class) and ``flags`` (words that qualify the number, comma-separated).
    Raises ValueError for no images, other shapes, and NaN.
    """
    features, logits = probe_features(probe, images, batch_size=batch_size)
    stats = real_feats.stats if isinstance(real_feats, Reference) else real_feats
    real = feature_stats(stats) if isinstance(stats, Tensor) else stats
    counts = torch.bincount(logits.argmax(dim=1), minlength=probe.net.classes)
    return {
        "probe_fd": frechet_distance(feature_stats(features), real),
        "probe_fd_n": len(images),
        "probe_id": real_feats.probe_id if isinstance(real_feats, Reference) else "",
        "class_counts": counts.tolist(),
        "flags": score_flags(min(len(images), real.n), probe.feature_width),
    }


def fixed_noise(n: int, seed: int = 0) -> Tensor:
    """Standard normal noise (n, 3, 32, 32) from a CPU generator of its own: the same on every machine."""
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def sample_images(
    model: VelocityModel, noise: Tensor, *, sampler: str = "euler", steps: int = 20, batch_size: int = 250
) -> Tensor:
    """Images (N, 3, 32, 32) on the CPU from noise, sampled in fp32, eager, in eval mode."""
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler {sampler!r} is not one of {', '.join(SAMPLERS)}")
    with evaluating(model) as (net, device):
        draw = SAMPLERS[sampler]
        return torch.cat(
            [draw(net, part.to(device), steps).float().cpu() for part in noise.split(batch_size)]
        )


def score_model(
    model: VelocityModel,
    probe: Probe,
    reference: Reference,
    *,
    n: int = 1000,
    sampler: str = "euler",
    steps: int = 20,
    seed: int = 0,
    batch_size: int = 250,
    shown: int = 64,
) -> dict[str, Any]:
    """``probe_scores`` of n images sampled from fixed noise, with ``sampler``, ``steps``, and ``images``:
    the first ``shown`` of them as uint8 (shown, 3, 32, 32), ready for ``save_grid``."""
    samples = sample_images(model, fixed_noise(n, seed), sampler=sampler, steps=steps, batch_size=batch_size)
    scores = probe_scores(probe, samples, reference)
    return {**scores, "sampler": sampler, "steps": steps, "images": to_uint8(samples[:shown])}


def anchors(
    probe: Probe,
    reference: Reference,
    train_images: Tensor,
    *,
    n: int = 1000,
    seed: int = 0,
    model: VelocityModel | None = None,
    steps: Sequence[int] = (5, 20, 50),
) -> dict[str, dict[str, Any]]:
    """Scores that give a probe-FD its scale, n images each: ``real`` (training images drawn without
    replacement), ``noise``, and with a model ``euler 5``, ``euler 20``, ``euler 50``."""
    order = torch.randperm(len(train_images), generator=torch.Generator().manual_seed(seed))
    noise = fixed_noise(n, seed)
    rows = {
        "real": probe_scores(probe, train_images[order[:n]], reference),
        "noise": probe_scores(probe, noise, reference),
    }
    if model is not None:
        for count in steps:
            rows[f"euler {count}"] = probe_scores(probe, sample_images(model, noise, steps=count), reference)
    return rows


def _read_stats(path: Path) -> FeatureStats | None:
    try:
        with safe_open(path, "pt") as file:
            return FeatureStats(file.get_tensor("mean"), file.get_tensor("cov"), int(file.metadata()["n"]))
    except (OSError, SafetensorError):
        return None


def _write_stats(stats: FeatureStats, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file({"mean": stats.mean, "cov": stats.cov}, temporary, metadata={"n": str(stats.n)})
