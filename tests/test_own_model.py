"""A sweep of a net that is not TinyDiT, on a folder of pictures: the documented way to one's own model and data."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from sweep_help import ONE_CPU, ROOT, records, sweep

from tinydit_ray.config import CellConfig, from_mapping
from tinydit_ray.network import build_network, check_networks, plain_network

OWN = "own_nets:conv"
DOCS = Path(__file__).parents[1] / "docs" / "analysis.md"


def test_a_net_of_ones_own_is_part_of_a_cells_identity():
    cell = from_mapping({"model": OWN, "dim": 12})
    assert (cell.network, cell.dim, cell.model) == (OWN, 12, "own_nets:conv 12/4/4")
    assert from_mapping({"model": cell.model}) == cell
    assert cell.config_id != from_mapping({"dim": 12}).config_id
    assert cell.replace(model="tiny") == from_mapping({"model": "tiny"})
    # a cell of TinyDiT keeps the id that it had before there were others
    assert "network" not in CellConfig().identity()
    with pytest.raises(ValueError, match=r"network: 'own nets' is not possible; possible: tinydit or package\.module"):
        CellConfig(network="own nets")


def test_the_net_is_seeded_and_scored_as_its_control():
    cell = from_mapping({"model": OWN, "dim": 12, "seed": 3})
    before = torch.get_rng_state()
    one, two = build_network(cell), build_network(cell)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.last.weight, build_network(cell.replace(seed=4)).last.weight)
    plain = plain_network(cell, one.to(torch.bfloat16))
    assert plain.last.weight.dtype == torch.float32
    assert torch.equal(plain.last.weight, one.last.weight.float())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "own_nets:none"}, "own_nets has no function none"),
        ({"model": "nowhere:net"}, "nowhere cannot be imported"),
        ({"model": "own_nets.py:conv"}, "own_nets.py cannot be imported (a module's name has no .py)"),
        ({"model": OWN, "attention": "sdpa"}, "attention: 'sdpa' has no effect on model own_nets:conv, whose function"
         " takes dim of the net's axes"),
        ({"model": "own_nets:one_size", "dim": 64}, "dim: 64 has no effect on model own_nets:one_size"),
        ({"model": OWN, "sampler": "bf16"}, "sampler: 'bf16' is of TinyDiT alone"),
        ({"model": "own_nets:wrong_shape"}, "it does not run on images"),
        ({"model": "own_nets:odd_parameter"}, "its parameter 'width' is no axis"),
        ({"model": "own_nets:no_net"}, "returned a Tensor, no torch.nn.Module"),
    ],
)  # fmt: skip
def test_what_is_no_such_net_is_one_line(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        check_networks([from_mapping(settings)])
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_sweep_of_the_documented_net_on_a_folder_of_pictures(tmp_path):
    """From a folder that holds the net as the documentation shows it: its cells are checked, timed, trained and scored
    like TinyDiT's; the training command takes the winner."""
    (code,) = (block for block in DOCS.read_text("utf-8").split("```") if block.startswith("python\n# my_nets.py"))
    (tmp_path / "my_nets.py").write_text(code.removeprefix("python\n"))
    own = "my_nets:conv"
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(160):
        Image.effect_noise((40, 40), 10 + number).convert("RGB").save(pictures / f"{number}.png")
    env = {"PYTHONPATH": str(ROOT)}
    done = sweep("speed_grid.py", "--model", own, "--set", "dim=12", "--set", "precision=fp32,bf16", *ONE_CPU,
                 "--set", "batch_size=16", "--data", str(pictures), "--time", "0.6", "--steps", "4", "--fd-n", "0",
                 "--rounds", "1", "--no-ray", "--name", "own", cwd=tmp_path, env=env)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "own"
    rows = records(folder)
    assert [row["status"] for row in rows] == ["ok", "ok"], [row["reason"] for row in rows]
    assert {row["config.model"] for row in rows} == {"my_nets:conv 12/4/4"}
    assert {row["effective.autocast_dtype"] for row in rows} == {"off", "bfloat16"}
    for row in rows:
        assert row["velocity_mse"] > 0
        assert row["model_gflops_per_step"] > 0
        assert math.isfinite(row["speedup_vs_control"])
    (folder / "p.yaml").write_text(json.dumps({"network": own, "dim": 12, "precision": "bf16", "batch_size": 16}))
    command = [sys.executable, "-m", "tinydit_ray.train", "--profile", str(folder / "p.yaml"), "--out", "trained",
               "--steps", "4", "--data", str(pictures), "--fd-n", "0", "--threads", "1"]  # fmt: skip
    trained = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True, timeout=200, check=False
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    saved = torch.load(tmp_path / "trained" / "checkpoint.pt", weights_only=True)
    assert saved["config"] == {"network": own, "dim": 12}
    parts = ("first", "time", "last")
    assert set(saved["model"]) == {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")}
