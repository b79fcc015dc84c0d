"""A probe: a trained classifier, the statistics of real images under it, and the file that holds both.

The file is safetensors: kernels and matrices in fp16, everything else in fp32 or float64, and in its
header the recipe, the accuracy of the weights as stored, and digests that are checked on loading.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tinydit_ray.atomic import replacing
from tinydit_ray.quality.frechet import FeatureStats, StatsAccumulator
from tinydit_ray.quality.net import ProbeNet, to_pixels
from tinydit_ray.quality.precision import full_precision

FORMAT = "1"
SHIPPED = Path(__file__).parent / "probes"
BATCH = 250
COUNTER = "num_batches_tracked"  # of batch norm; nothing reads it after training


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A classifier in fp32 on the CPU, and the statistics of the real test images it comes with.

    ``digest`` is that of the weights as stored, ``data_digest`` that of the data behind ``stats``.
    """

    name: str
    net: ProbeNet
    digest: str
    stats: FeatureStats
    data_digest: str
    meta: Mapping[str, str]

    @property
    def feature_width(self) -> int:
        return self.net.feature_width

    @property
    def probe_id(self) -> str:
        """Names the weights and the real data of the shipped statistics."""
        return self.id_for(self.data_digest)

    def id_for(self, data_digest: str) -> str:
        """Names the weights and the real data a distance is taken to, e.g. ``cifar10-1f2e3d4c@9a8b7c6d``."""
        return f"{self.name}-{self.digest[:12]}@{data_digest}"


def probe_features(probe: Probe, images: Tensor, *, batch_size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Features (N, F) and logits (N, 10) of images (N, 3, 32, 32), in fp32 on the CPU.

    uint8 images are scaled, floats of any width are cast to fp32 and clipped to [−1, 1]; NaN is a ValueError.
    """
    pixels = to_pixels(images).cpu()
    if not len(pixels):
        raise ValueError("no images: a score needs at least one")
    features, logits = [], []
    with full_precision():
        for chunk in pixels.split(batch_size):
            f, z = probe.net(chunk.contiguous(memory_format=torch.channels_last))
            features.append(f)
            logits.append(z)
    return torch.cat(features), torch.cat(logits)


def image_stats(probe: Probe, images: Tensor) -> FeatureStats:
    """Feature statistics of images (N, 3, 32, 32), a few thousand at a time."""
    accumulator = StatsAccumulator()
    for chunk in images.split(2000):
        accumulator.add(probe_features(probe, chunk)[0])
    return accumulator.result()


def new_probe(name: str, net: ProbeNet, images: Tensor, data_digest: str, meta: Mapping[str, str]) -> Probe:
    """A probe with its weights rounded to what the file holds, and statistics of ``images`` under those."""
    stored = _stored(net)
    net = _net(stored, net.widths, net.classes)
    empty = FeatureStats(torch.zeros(0), torch.zeros(0, 0), 0)
    probe = Probe(
        name=name, net=net, digest=_digest(stored), stats=empty, data_digest=data_digest, meta=dict(meta)
    )
    return dataclasses.replace(probe, stats=image_stats(probe, images))


def save_probe(probe: Probe, path: str | Path) -> None:
    """Write a probe to one safetensors file, whole or not at all."""
    tensors = {f"net.{name}": value for name, value in _stored(probe.net).items()}
    tensors |= {"stats.mean": probe.stats.mean, "stats.cov": probe.stats.cov}
    tensors["check.features"] = probe_features(probe, _check_images())[0]
    header = {
        **probe.meta,
        "format": FORMAT,
        "name": probe.name,
        "widths": repr(probe.net.widths),
        "classes": str(probe.net.classes),
        "digest": probe.digest,
        "stats_digest": _digest({name: tensors[name] for name in ("stats.mean", "stats.cov")}),
        "stats_n": str(probe.stats.n),
        "data_digest": probe.data_digest,
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file({name: value.contiguous() for name, value in tensors.items()}, temporary, metadata=header)
        temporary.chmod(0o644)  # safetensors writes for the owner alone; a package is read by others


def shipped_probes() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.safetensors"))


def load_probe(name_or_path: str | Path = "cifar10") -> Probe:
    """A probe of the package by its name, or one from a file.

    Raises ValueError, in one line, where there is none, or where the file is not what its header says.
    """
    path = SHIPPED / f"{name_or_path}.safetensors"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        raise ValueError(
            f"no probe {str(name_or_path)!r}: not a file, nor one of {', '.join(shipped_probes())}"
        )
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"probe {path}: unreadable ({error})") from None
    return _checked(path, header, tensors)


def _checked(path: Path, header: Mapping[str, str], tensors: dict[str, Tensor]) -> Probe:
    """The probe of a file's content, once digests and a trial run agree with the header."""
    if header.get("format") != FORMAT:
        raise ValueError(f"probe {path}: format {header.get('format')} where this version reads {FORMAT}")
    stored = {name[4:]: value for name, value in tensors.items() if name.startswith("net.")}
    stats = {name: tensors[name] for name in ("stats.mean", "stats.cov")}
    for what, found in (("digest", _digest(stored)), ("stats_digest", _digest(stats))):
        if found != header[what]:
            raise ValueError(f"probe {path} is stale: {what} {found[:12]}, header {header[what][:12]}")
    probe = Probe(
        name=header["name"],
        net=_net(stored, ast.literal_eval(header["widths"]), int(header["classes"])),
        digest=header["digest"],
        stats=FeatureStats(stats["stats.mean"], stats["stats.cov"], int(header["stats_n"])),
        data_digest=header["data_digest"],
        meta=header,
    )
    off = float((probe_features(probe, _check_images())[0] - tensors["check.features"]).abs().max())
    if not off < 1e-3:
        raise ValueError(f"probe {path} is stale: this version gives other features (off by {off:.2g})")
    return probe


def _stored(net: ProbeNet) -> dict[str, Tensor]:
    """Weights as the file holds them; normalisation and biases are too few to be worth rounding."""
    return {
        name: value.detach().to(torch.float16 if value.ndim > 1 else torch.float32).contiguous()
        for name, value in net.state_dict().items()
        if not name.endswith(COUNTER)
    }


def _net(stored: Mapping[str, Tensor], widths: tuple[int, ...], classes: int) -> ProbeNet:
    with torch.random.fork_rng(devices=[]):
        net = ProbeNet(widths, classes)
    whole = {name: value.float() for name, value in stored.items()}
    counters = {name: value for name, value in net.state_dict().items() if name.endswith(COUNTER)}
    net.load_state_dict(whole | counters, strict=True)
    return net.requires_grad_(False).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and bytes, in the order of the names."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        sha.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        sha.update(value.view(torch.uint8).numpy().tobytes() if value.ndim else value.numpy().tobytes())
    return sha.hexdigest()


def _check_images() -> Tensor:
    """Two fixed pictures, waves of three colours, on which a loaded probe must give the stored features."""
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    waves = [torch.sin(0.3 * (k + 1) * x + 0.2 * (3 - k) * y + k) for k in range(3)]
    picture = torch.stack(waves)
    return torch.stack([picture, picture.flip(0) * 0.5])
