"""Probes: training, the file and its checks, the command, and the two that the package ships."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinydit_ray.quality import probe as command
from tinydit_ray.quality import probe_features, probe_for, probe_scores, shipped_probes
from tinydit_ray.quality.classifier import SHIPPED, Probe, load_probe, new_probe, save_probe
from tinydit_ray.quality.frechet import frechet_distance
from tinydit_ray.quality.net import ProbeNet
from tinydit_ray.quality.training import ProbeRecipe, _affordable, accuracy, augment, train_net, whiten

SMALL = ProbeRecipe(widths=(4, 8, 8, 8), epochs=6, batch_size=32, lr=0.1, amp=False)


def stripes(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ten classes of stripes of different widths, with noise: uint8 (n, 3, 32, 32) and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 10
    phase = torch.rand(n, 1, generator=generator) * 6
    wave = torch.sin(torch.arange(32.0) * (0.2 + 0.25 * labels[:, None]) + phase)
    images = wave[:, None, :, None].expand(n, 3, 32, 32) * 90 + 128
    noise = torch.randn(n, 3, 32, 32, generator=generator) * 20
    return (images + noise).clamp(0, 255).to(torch.uint8), labels


@dataclass(frozen=True)
class Split:
    images: Tensor
    labels: Tensor
    source: str
    digest: str


@pytest.fixture(scope="module")
def net() -> ProbeNet:
    return train_net(*stripes(640), SMALL)


@pytest.fixture
def probe(net: ProbeNet) -> Probe:
    return new_probe("small", net, stripes(60, 1)[0], "dddd", {"accuracy": "0.5"})


@pytest.fixture
def file(probe: Probe, tmp_path: Path) -> Path:
    save_probe(probe, tmp_path / "small.safetensors")
    return tmp_path / "small.safetensors"


def rewrite(file: Path, change: dict[str, Tensor], header: dict[str, str] | None = None) -> None:
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file) | change, file, metadata=metadata | (header or {}))


@pytest.mark.slow
def test_training_learns(net: ProbeNet):
    images, labels = stripes(400, 1)
    untrained = accuracy(ProbeNet(SMALL.widths).eval(), images, labels)
    assert accuracy(net, images, labels) > 0.6 > 0.3 > untrained


def test_one_seed_one_result_and_the_global_generator_is_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    short = replace(SMALL, epochs=1)
    one, two, other = (train_net(*stripes(96), r) for r in (short, short, replace(short, seed=1)))
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    assert not torch.equal(one.head.weight, other.head.weight)


def test_learning_rate_rises_then_falls_to_zero():
    rates = [SMALL.lr_at(p) for p in (0.0, 0.1, 0.2, 0.6, 1.0)]
    assert rates == pytest.approx([0.0, 0.05, 0.1, 0.05, 0.0])


def test_minutes_cut_whole_epochs():
    assert _affordable(1000, 100, 0.6, minutes=5) == 500
    assert _affordable(1000, 100, 0.6, minutes=100) == 1000
    assert _affordable(1000, 100, 60.0, minutes=1) == 100


def test_augmentation_moves_and_flips_whole_images():
    base = torch.arange(32, dtype=torch.uint8).expand(1, 3, 32, 32)  # columns hold their own number
    out = augment(base.expand(400, 3, 32, 32), torch.Generator().manual_seed(0))
    assert out.shape == (400, 3, 32, 32)
    assert out.dtype == torch.uint8
    middle = out[:, 0, 16, 12:20].int()
    steps = middle.diff(dim=1)
    flipped = (steps == -1).all(dim=1)
    assert bool((flipped | (steps == 1).all(dim=1)).all())
    assert 140 < int(flipped.sum()) < 260
    shifts = (middle[~flipped, 0] - 12).unique().tolist()
    assert shifts == [-2, -1, 0, 1, 2]


def test_the_stem_starts_by_whitening_patches():
    images = stripes(200)[0]
    stem = torch.nn.Conv2d(3, 8, 3, bias=False)
    whiten(stem, images)
    with torch.no_grad():
        out = stem(images.double().float() / 127.5 - 1)
    channels = out.permute(1, 0, 2, 3).flatten(1)
    assert torch.allclose(channels[:4], -channels[4:], atol=1e-5)
    # The strongest directions come out uncorrelated, with variance 1 but for the small term in the root.
    torch.testing.assert_close(torch.cov(channels[:4]), torch.eye(4), atol=0.05, rtol=0.0)


def test_too_few_images_are_refused():
    with pytest.raises(ValueError, match="20 training images are fewer than one batch of 32"):
        train_net(*stripes(20), SMALL)


def test_a_file_gives_back_the_same_probe(probe: Probe, file: Path):
    loaded = load_probe(file)
    images = stripes(20, 2)[0]
    assert torch.equal(probe_features(loaded, images)[0], probe_features(probe, images)[0])
    assert (loaded.digest, loaded.probe_id, loaded.stats.n) == (probe.digest, probe.probe_id, 60)
    assert frechet_distance(loaded.stats, probe.stats) == 0.0
    assert not any(p.requires_grad for p in loaded.net.parameters())
    assert [path.name for path in file.parent.iterdir()] == ["small.safetensors"]  # no partial file left


def test_weights_are_16_bit_and_the_probe_in_memory_has_them_rounded(net: ProbeNet, probe: Probe, file: Path):
    tensors = load_file(file)
    assert {value.dtype for name, value in tensors.items() if name.endswith("weight") and value.ndim > 1} == {
        torch.float16
    }
    assert tensors["stats.cov"].dtype == torch.float64
    assert torch.equal(probe.net.head.weight, net.head.weight.half().float())


def test_loading_leaves_the_global_generator_alone(file: Path):
    before = torch.get_rng_state()
    load_probe(file)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["net.head.weight", "stats.mean"])
def test_changed_tensors_are_stale(file: Path, name: str):
    rewrite(file, {name: load_file(file)[name] + 0.5})
    with pytest.raises(ValueError, match="is stale: ") as caught:
        load_probe(file)
    assert "\n" not in str(caught.value)


def test_changed_behaviour_is_stale(file: Path):
    rewrite(file, {"check.features": load_file(file)["check.features"] + 0.01})
    with pytest.raises(ValueError, match="stale: this version gives other features"):
        load_probe(file)


def test_other_formats_and_missing_files_are_one_line(file: Path, tmp_path: Path):
    rewrite(file, {}, {"format": "99"})
    with pytest.raises(ValueError, match="format 99 where this version reads 1"):
        load_probe(file)
    file.write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match="unreadable"):
        load_probe(file)
    with pytest.raises(ValueError, match="no probe 'imagenet'"):
        load_probe("imagenet")


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's data: stripes in place of a data set."""
    splits = {"train": (stripes(260), "tttt"), "test": (stripes(60, 1), "eeee")}

    def load_split(data: str, split: str) -> Split:
        (images, labels), digest = splits[split]
        return Split(images, labels, "shapes", digest)

    monkeypatch.setattr(command, "load_split", load_split)


@pytest.mark.slow
def test_the_command_trains_and_evaluates(data: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "new" / "shapes.safetensors"
    assert command.main(["train", "--data", "shapes", "--out", str(out), "--epochs", "2", "--fp32"]) == 0
    trained = capsys.readouterr().out.splitlines()
    assert command.main(["evaluate", "--data", "shapes", "--probe", str(out)]) == 0
    evaluated = capsys.readouterr().out.splitlines()
    probe = load_probe(out)
    assert f"digest {probe.digest}" in trained
    assert f"digest {probe.digest}" in evaluated
    assert evaluated[-1] == trained[-1] == f"accuracy {float(probe.meta['accuracy']):.4f}"
    assert json.loads(probe.meta["recipe"])["epochs"] == 2
    assert probe.data_digest == "eeee"
    card = out.with_suffix(".md").read_text()
    assert probe.digest in card
    assert probe.meta["command"] in card


@pytest.mark.slow
def test_the_command_measures_bias_and_anchors(data: None, file: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main(["bias", "--probe", str(file), "--draws", "2"]) == 0
    assert "250" in capsys.readouterr().out
    assert command.main(["anchors", "--probe", str(file), "--n", "50"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["real", "noise"]


def test_the_command_says_in_one_line_what_is_wrong(
    data: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert command.main(["evaluate", "--probe", str(tmp_path / "none.safetensors")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no probe")
    assert error.count("\n") == 1


def test_unlabelled_images_cannot_train_a_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    images = stripes(300)[0]
    unlabelled = Split(images, torch.full((300,), -1), "folder", "ffff")
    monkeypatch.setattr(command, "load_split", lambda data, split: unlabelled)
    assert command.main(["train", "--out", str(tmp_path / "x.safetensors")]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_importing_the_package_loads_no_heavy_library():
    heavy = "('torchvision', 'ray', 'mlflow')"
    code = f"import sys, tinydit_ray.quality; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_ships_two_probes_and_their_cards():
    assert shipped_probes() == ["cifar10", "shapes"]
    assert probe_for("shapes").name == "shapes"
    assert probe_for("cifar10-parquet").name == probe_for("folder").name == "cifar10"
    for name in shipped_probes():
        probe, card = load_probe(name), (SHIPPED / f"{name}.md").read_text()
        assert probe.digest in card
        assert probe.data_digest in card
        assert f"{float(probe.meta['accuracy']):.4f}" in card
        assert sum(path.stat().st_size for path in SHIPPED.glob(f"{name}.*")) < 3e6


@pytest.mark.slow
def test_shipped_features_see_noise_and_blur():
    """The distance to the real images grows with damage; it would not if features were dead or constant."""
    from tinydit_ray.data import draw_shapes

    probe = load_probe("shapes")
    images = draw_shapes(300, seed=7)[0].float() / 127.5 - 1
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    blurred = torch.nn.functional.avg_pool2d(images, 5, stride=1, padding=2)
    clean, grainy, coarse, blur = (
        probe_scores(probe, x, probe.stats)["probe_fd"]
        for x in (images, images + 0.2 * noise, images + 0.5 * noise, blurred)
    )
    assert clean * 1.3 < grainy < coarse
    assert clean * 10 < min(coarse, blur)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("TINYDIT_DATA"), reason="needs CIFAR-10 at $TINYDIT_DATA")
def test_shipped_probe_recognises_cifar10():
    from tinydit_ray.data import load, prepare, resolve

    test = load(prepare(resolve("cifar10")[0]), "test")
    probe = load_probe("cifar10")
    assert float(probe.meta["accuracy"]) >= 0.87
    assert accuracy(probe.net, test.images[:1000], test.labels[:1000]) == pytest.approx(
        float(probe.meta["accuracy"]), abs=0.03
    )
    if test.digest == probe.data_digest:
        some = probe_features(probe, test.images[:1000])[0].double()
        assert float((some.mean(dim=0) - probe.stats.mean).abs().max()) < 0.2
