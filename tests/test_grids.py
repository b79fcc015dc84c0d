"""The grids that come with the product: each can be read, resolves, and says how it is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from sweep_help import ROOT

from tinydit_ray.grid import load_grid
from tinydit_ray.sweep.cli import COMMANDS, autotune, speed_grid
from tinydit_ray.sweep.options import SweepOptions, named_grid, options_from
from tinydit_ray.sweep.parser import parser
from tinydit_ray.sweep.plan import make_cells

GRIDS = sorted((ROOT / "sweeps" / "grids").glob("*.yaml"))
HERE = [path for path in GRIDS if "gpu" not in path.stem or torch.cuda.is_available()]
NAMES = {"published", "cpu", "gpu", "compile", "attention", "precision", "sampling", "size",
         "tune-cpu", "tune-gpu"}  # fmt: skip


def options_of(name: str, *more: str) -> SweepOptions:
    args = parser("speed_grid.py", "").parse_args(["--grid", name, *more])
    return options_from(args, default_grid="published", command=[])


def test_the_named_grids_are_there():
    assert {path.stem for path in GRIDS} >= NAMES
    assert all(named_grid(path.stem).resolve() == path for path in GRIDS)


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_a_grid_begins_with_its_command_its_minutes_and_its_result(path: Path):
    first, second, *_ = path.read_text().splitlines()
    command = re.match(r"# (python sweeps/\S+\.py[^(]*)", first)
    assert command, first
    words = shlex.split(command[1])
    assert (ROOT / words[1]).exists()
    assert Path(words[1]).stem.replace("_", "-") in COMMANDS
    defaults = {
        "speed_grid.py": ["published"], "null_check.py": ["null"], "quality_grid.py": ["quality"],
        "autotune.py": ["tune-cpu", "tune-gpu"], "scaling_grid.py": ["scaling"],
    }  # fmt: skip
    named = [words[words.index("--grid") + 1]] if "--grid" in words else defaults[Path(words[1]).name]
    assert path.stem in named
    assert "minutes" in second
    assert "esult" in second


def test_the_gallery_shows_each_grid_with_its_command():
    rows = [line for line in (ROOT / "docs" / "gallery.md").read_text("utf-8").splitlines() if line.startswith("| ")]
    for path in GRIDS:
        (row,) = [row for row in rows if f"](../sweeps/grids/{path.name})" in row]
        command = re.match(r"# (python sweeps/\S+\.py(?: --grid \S+)?)", path.read_text())
        assert command
        assert f"`{command[1]}`" in row


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_a_grid_resolves_to_different_cells_and_their_controls(path: Path, device: str):
    grid = load_grid(path)
    cells, duplicates = make_cells(
        options_of(path.stem), device=device, cpus=2, node_kind="a-machine", data_digest="d"
    )
    assert duplicates == 0 or path.stem in ("tune-cpu", "tune-gpu", "precision")
    assert len({cell.name for cell in cells}) == len(cells), "two cells cannot be told apart in the table"
    assert grid.rounds is not None
    assert grid.rounds >= 2


@pytest.mark.slow
@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_a_grid_is_planned(path: Path, capsys: pytest.CaptureFixture[str]):
    command = autotune if path.stem.startswith("tune-") and path in HERE else speed_grid
    assert command(["--grid", path.stem, "--dry-run", "--data", "shapes"]) == 0
    assert "nothing was run" in capsys.readouterr().out


def test_a_grid_files_budget_holds_for_the_grid_as_written():
    assert options_of("cpu").budget_s == 14 * 60
    assert options_of("published").budget_s == 11 * 60
    assert options_of("cpu", "--budget", "5m").budget_s == 300
    assert options_of("attention").budget_s == 0
    for other in (["--rounds", "1"], ["--time", "5"], ["--ci", "0.02"], ["--set", "batch_size=64"]):
        assert options_of("cpu", *other).budget_s == 0
