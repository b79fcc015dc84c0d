"""The forms of the sampler: what each computes, what really runs, and a sweep that times them in pairs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sweep_help import ONE_CPU, records, results, sweep

from tinydit_ray.bench.agreement import relative_error
from tinydit_ray.bench.capability import Unsupported, check_capability
from tinydit_ray.bench.effective import trace_ops
from tinydit_ray.config import from_mapping
from tinydit_ray.flow import euler_sample
from tinydit_ray.measure_sampler import SAMPLED_IMAGES, TOLERANCES
from tinydit_ray.model import TinyDiT, TinyDiTConfig, build_model
from tinydit_ray.quality import velocity_mse
from tinydit_ray.quality.velocity import velocity_error
from tinydit_ray.sampler import SAMPLE_STEPS, Sampler
from tinydit_ray.sweep.options import options_from
from tinydit_ray.sweep.parser import parser
from tinydit_ray.sweep.plan import make_cells

pytestmark = pytest.mark.usefixtures("one_thread")
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
FORMS = [
    "eager",
    "bf16",
    pytest.param("compiled", marks=pytest.mark.slow),
    pytest.param("int8", marks=pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")),
]


def model_of(**switches: Any) -> TinyDiT:
    return build_model(TinyDiTConfig(**{"dim": 32, "depth": 2, "num_heads": 2, **switches}), 0)


def images(n: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, 32, 32, generator=g), torch.rand(n, generator=g)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_computes_the_velocity_of_the_plain_net(form: str):
    model, (x, t) = model_of(), images()
    with torch.no_grad():
        found, plain = Sampler(model, form).velocity(x, t), model(x, t)
    assert found.dtype == torch.float32
    assert relative_error(found, plain) < TOLERANCES[form]
    if form in ("bf16", "int8"):
        assert relative_error(found, plain) > 1e-5, "it computed in fp32"
    if form == "eager":
        assert torch.equal(found, plain)


def test_a_wrong_net_is_outside_every_tolerance():
    x, t = images()
    other = Sampler(build_model(TinyDiTConfig(dim=32, depth=2, num_heads=2), 1), "eager").velocity(x, t)
    assert relative_error(Sampler(model_of(), "eager").velocity(x, t), other) > max(TOLERANCES.values())


@pytest.mark.parametrize("form", FORMS)
def test_what_really_runs(form: str):
    model, (x, t) = model_of(), images()
    sampler = Sampler(model, form)
    sampler.velocity(x, t)
    with torch.no_grad():
        inside = sampler.net(x.to(sampler.dtype), t).dtype
    ops = trace_ops(lambda: sampler.velocity(x, t), on_cuda=False)
    assert inside == (torch.bfloat16 if form == "bf16" else torch.float32)
    assert bool(ops.compiled_regions) == (form == "compiled")
    assert bool(ops.int8_matmuls) == (form == "int8")


@pytest.mark.parametrize("form", FORMS[:2])
def test_a_sampler_leaves_the_model_alone_and_keeps_its_own_weights(form: str):
    model, (x, t) = model_of(), images()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sampler = Sampler(model, form)
    first = sampler.velocity(x, t)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(sampler.velocity(x, t), first)


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
def test_int8_leaves_out_what_does_not_go_through_its_layer():
    x, t = images()
    model = model_of(adaln="merged", qkv="separate")
    assert relative_error(Sampler(model, "int8").velocity(x, t), Sampler(model, "eager").velocity(x, t)) < 0.1


@pytest.mark.skipif(HAS_TORCHAO, reason="torchao is installed")
def test_int8_without_torchao_says_what_to_install():
    with pytest.raises(Unsupported, match=r"sampler int8: the package torchao is not installed \(pip install"):
        check_capability(from_mapping({"model": "micro", "sampler": "int8"}))


def test_a_sample_is_twenty_euler_steps_of_the_form():
    model, (noise, _) = model_of(), images()
    sampler = Sampler(model, "bf16")
    assert torch.equal(sampler.sample(noise), euler_sample(sampler.velocity, noise, SAMPLE_STEPS))
    assert SAMPLE_STEPS == 20


def test_the_velocity_error_of_the_plain_net_is_its_velocity_mse():
    model, (x, _) = model_of(), images(7)
    found = velocity_error(Sampler(model, "eager").velocity, x.clamp(-1, 1), device="cpu", batch_size=3)
    assert found == pytest.approx(velocity_mse(model, x.clamp(-1, 1)), rel=1e-6)


def test_blocks_divide_what_is_scored():
    """Compiled nets are not compiled again for a last, smaller batch."""
    assert all(2000 % n == 0 and 250 % n == 0 for n in SAMPLED_IMAGES.values())


def cells_of(*sets: str) -> list[Any]:
    args = parser("x", "").parse_args([word for text in sets for word in ("--set", text)])
    options = options_from(args, default_grid="published", command=[])
    return make_cells(options, device="cpu", cpus=1, node_kind="k", data_digest="d")[0]


def test_a_grid_that_varies_the_sampler_times_it_in_every_cell():
    sampled, trained = cells_of("sampler=eager,bf16"), cells_of("attention=manual")
    assert [cell.times for cell in sampled] == ["sampler", "sampler"]
    assert [cell.times for cell in trained] == ["step"]
    assert [cell.control.sampler for cell in sampled] == ["eager", "eager"]
    assert sampled[0].config == trained[0].config
    assert sampled[0].cell_id != trained[0].cell_id, "one is a training step, the other a sample"


@pytest.mark.slow
def test_a_sweep_of_samplers(tmp_path: Path) -> None:
    sets = ["--set", "model=32/1/2", "--set", "batch_size=16", "--set", "sampler=eager,bf16,int8"]
    options = ["--data", "shapes", "--time", "0.6", "--steps", "4", "--fd-n", "130", "--rounds", "1", "--no-ray"]
    done = sweep("speed_grid.py", *sets, *options, *ONE_CPU, "--name", "s", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every cell is timed by its sampler" in done.stdout
    assert "ms/image" in done.stdout
    folder = tmp_path / "runs" / "s"
    rows = {row["config.sampler"]: row for row in records(folder)}
    for form, dtype in (("eager", "float32"), ("bf16", "bfloat16")):
        row = rows[form]
        assert row["status"] == "ok", row["reason"]
        assert row["effective.matmul_dtype"] == dtype
        assert row["ms_per_step"] is None
        assert row["sample_ms_per_image"] > 0
        assert row["control_sample_ms_per_image"] > 0
        assert row["speedup_vs_control"] > 0
        assert row["probe_fd"] > 0
        assert row["sample_velocity_mse"] == pytest.approx(row["velocity_mse"], rel=1e-2)
    assert rows["eager"]["sample_velocity_mse"] == pytest.approx(rows["eager"]["velocity_mse"], rel=1e-5)
    assert rows["bf16"]["sample_velocity_mse"] != rows["eager"]["sample_velocity_mse"]
    assert rows["bf16"]["velocity_mse"] == rows["eager"]["velocity_mse"], "trained alike"
    if not HAS_TORCHAO:
        assert rows["int8"]["status"] == "unsupported"
        assert "torchao" in rows["int8"]["reason"]
    table = results(folder)
    assert table[table["status"] == "ok"]["verdict"].notna().all()
    steps = json.loads(next(folder.glob("cells/*/r1-a1/steps.json")).read_text())
    assert steps["unit"] == "25 images in 20 Euler steps"
    assert not (folder / "best.yaml").exists()
