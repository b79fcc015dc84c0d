"""The flow of the published tutorial through its own names: five setups timed by hand, a training, scores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tinydit_ray
from tinydit_ray import (
    FastTrainer,
    ImageFolderDataset,
    TinyDiT,
    TinyDiTConfig,
    Trainer,
    euler_sample,
    flow_matching_loss,
    load_probe,
    make_loader,
    probe_features,
    probe_scores,
    save_grid,
    time_steps,
    velocity_mse,
)
from tinydit_ray.quality import fixed_noise

CFG = {"dim": 32, "depth": 1, "num_heads": 2}
SETUPS = {
    "manual fp32": ({}, {}),
    "sdpa": ({"use_sdpa": True}, {}),
    "sdpa bf16": ({"use_sdpa": True}, {"amp_dtype": torch.bfloat16}),
    "sdpa compile": ({"use_sdpa": True}, {"compile": True}),
    "sdpa compile bf16": ({"use_sdpa": True}, {"compile": True, "amp_dtype": torch.bfloat16}),
}


@pytest.fixture
def images(tmp_path: Path) -> ImageFolderDataset:
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 40), ("test", 12)):
        (tmp_path / split / "a").mkdir(parents=True)
        for i in range(count):
            pixels = torch.randint(0, 256, (32, 32, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / split / "a" / f"{i}.png")
    return ImageFolderDataset(tmp_path / "train", img_size=32)


@pytest.mark.slow
def test_five_setups_give_the_same_loss(images: ImageFolderDataset) -> None:
    loader = make_loader(images, batch_size=16, num_workers=0)
    batches = [(x, torch.randn_like(x), torch.rand(len(x))) for x, _ in loader]
    losses = {}
    for name, (model_switches, trainer_switches) in SETUPS.items():
        torch.manual_seed(0)
        model = TinyDiT(TinyDiTConfig(**CFG), **model_switches)
        trainer = FastTrainer(model, flow_matching_loss, **trainer_switches)
        first, steady = time_steps(trainer.train_step, batches, steps=7, warmup=5)
        assert first > 0
        assert len(steady) == 2
        losses[name] = trainer.evaluate(batches)
        assert trainer.model is model
    reference = losses["manual fp32"]
    for name, loss in losses.items():
        assert loss == pytest.approx(reference, abs=0.02 if "bf16" in name else 2e-4), name


@pytest.mark.slow
def test_train_save_load_sample_and_score(images: ImageFolderDataset, tmp_path: Path) -> None:
    torch.manual_seed(0)
    cfg = TinyDiTConfig(**CFG)
    trainer = Trainer(TinyDiT(cfg), flow_matching_loss, lr=1e-3)
    before = velocity_mse(trainer.model, images.images)
    trainer.fit(make_loader(images, batch_size=16, num_workers=0), max_steps=60, log_every=20)
    assert velocity_mse(trainer.model, images.images) < before
    trainer.save(tmp_path / "model.pt", config=cfg)
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    again = TinyDiT(TinyDiTConfig(**saved["config"]))
    again.load_state_dict(saved["model"], strict=True)
    samples = euler_sample(again, fixed_noise(8), steps=4)
    assert samples.shape == (8, 3, 32, 32)
    probe = load_probe("cifar10")
    features, logits = probe_features(probe, images.images)
    assert logits.shape == (len(images.images), 10)
    assert probe_scores(probe, samples, features)["probe_fd"] > 0
    save_grid(samples, tmp_path / "samples.png", nrow=4)
    assert (tmp_path / "samples.png").stat().st_size > 0


def test_every_public_name_loads() -> None:
    for name in tinydit_ray.__all__:
        assert getattr(tinydit_ray, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        tinydit_ray.no_such_name  # noqa: B018


@pytest.mark.slow
def test_imports_point_one_way(tmp_path: Path) -> None:
    """Neither the package nor a whole cell's modules import ray or mlflow; only config imports no torch."""
    code = (
        "import sys, tinydit_ray, tinydit_ray.config, tinydit_ray.record, tinydit_ray.grid\n"
        "assert 'torch' not in sys.modules\n"
        "import tinydit_ray.cell, tinydit_ray.measure, tinydit_ray.sweep.driver, tinydit_ray.sweep.local\n"
        "import tinydit_ray.tracking, tinydit_ray.quality, tinydit_ray.sweep.cli\n"
        "bad = {'ray', 'mlflow', 'torchvision'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


SOURCES = sorted((Path(tinydit_ray.__file__).parent).rglob("*.py"))


@pytest.mark.parametrize("package", ["ray", "mlflow"])
def test_only_its_own_package_imports(package: str) -> None:
    home = {"ray": "distributed", "mlflow": "tracking"}[package]
    for path in SOURCES:
        if home in path.parts:
            continue
        lines = [line.strip() for line in path.read_text().splitlines()]
        offending = [line for line in lines if line.startswith((f"import {package}", f"from {package}"))]
        assert not offending, (path, offending)
