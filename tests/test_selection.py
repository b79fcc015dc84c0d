"""Which cells of a grid run: ``--only``, ``--repeat``, and options that exclude each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sweep_help import TINY, records, results, sweep

from tinydit_ray.bench.verdict import Floor
from tinydit_ray.config import CellConfig, from_mapping
from tinydit_ray.grid import GridError
from tinydit_ray.record import Record, new_record
from tinydit_ray.sweep.cli import parser
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.options import SweepOptions, options_from
from tinydit_ray.sweep.plan import make_cells
from tinydit_ray.sweep.repeat import compare, grid_of, read_record

PRODUCT = ["--set", "attention=manual,sdpa", "--set", "precision=fp32,bf16"]


def options(*arguments: str) -> SweepOptions:
    args = parser("speed_grid.py", "").parse_args([*arguments, "--device", "cpu"])
    return options_from(args, default_grid="published", command=[])


def names(*arguments: str) -> list[str]:
    cells, _ = make_cells(options(*arguments), device="cpu", cpus=1, node_kind="k", data_digest="d")
    return [cell.name for cell in cells]


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["sdpa bf16"], ["sdpa bf16"]),
        (["*bf16"], ["manual bf16", "sdpa bf16"]),
        (["manual fp32", "sdpa bf16"], ["manual fp32", "sdpa bf16"]),
        (["sdpa*", "*bf16"], ["manual bf16", "sdpa fp32", "sdpa bf16"]),
    ],
)
def test_only_keeps_the_cells_of_these_names_and_their_names(patterns: list[str], kept: list[str]) -> None:
    asked = [word for pattern in patterns for word in ("--only", pattern)]
    assert names(*PRODUCT, *asked) == kept


def test_only_takes_a_cell_id() -> None:
    cells, _ = make_cells(options(*PRODUCT), device="cpu", cpus=1, node_kind="k", data_digest="d")
    assert names(*PRODUCT, "--only", cells[2].cell_id) == [cells[2].name]


def test_only_a_name_that_no_cell_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="no cell is called so; the grid has 'manual fp32', 'manual bf16'"):
        names(*PRODUCT, "--only", "spda*")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", "a", "--resume", "b"], "--name and --resume"),
        (["--concurrent", "2", "--no-ray"], "without Ray cells run one after another"),
        (["--max-failures", "2", "--no-ray"], "without Ray a trial is not started again"),
        (["--repeat", "nowhere/record.json"], "cannot be read"),
    ],
)
def test_options_that_exclude_each_other(arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        options(*arguments)


# --- repeat -----------------------------------------------------------------------------------------------


def record_of(cell: CellConfig, value: float = 1.2, half: float = 0.02, **more: Any) -> Record:
    speed = {"speedup_vs_control": value, "speedup_ci_low": value / (1 + half), "speedup_ci_high": value * (1 + half)}
    return new_record(**cell.columns(), **speed, timed_steps=60, status="ok", **more)


def test_the_grid_of_a_record_is_its_cell(tmp_path: Path) -> None:
    cell = from_mapping({"attention": "sdpa", "precision": "bf16", "compile": "default", "dim": 96, "seed": 3})
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record_of(cell)))
    cells, duplicates = grid_of(read_record(path), path).resolve({"model": "tiny"}, {})
    assert (cells, duplicates) == ([cell], 0)


def test_a_repeated_cell_keeps_the_control_of_its_sweep(tmp_path: Path) -> None:
    path = tmp_path / "cells" / "x" / "r1-a1" / "record.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record_of(CellConfig())))
    (tmp_path / "sweep.json").write_text(json.dumps({"grid": {"control": {"attention": "sdpa"}}}))
    assert grid_of(read_record(path), path).control == {"attention": "sdpa"}


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"cell_id": "a"}'])
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(GridError, match="not a record"):
        read_record(path)


def test_then_and_now_agree_within_chance_and_differ_beyond_it() -> None:
    floor = Floor(process_sd=0.01, df=20)
    cell = CellConfig()
    then, same = record_of(cell, 1.20), [record_of(cell, value) for value in (1.21, 1.19, 1.20)]
    faster = [record_of(cell, value) for value in (1.50, 1.51, 1.49)]
    assert "they agree" in compare(then, same, floor)
    assert "they differ by +25.0 %" in compare(then, faster, floor)


@pytest.mark.slow
def test_a_record_is_measured_once_more_from_the_command_line(tmp_path: Path) -> None:
    first = sweep(
        "speed_grid.py", *TINY, "--set", "attention=sdpa", "--no-ray", "--rounds", "1", "--name", "one", cwd=tmp_path
    )
    assert first.returncode == 0, first.stdout + first.stderr
    (path,) = (tmp_path / "runs" / "one").glob("cells/*/r1-a1/record.json")
    again = sweep(
        "speed_grid.py", "--repeat", str(path), "--data", "shapes", "--time", "0.6", "--steps", "0",
        "--no-ray", "--rounds", "1", "--name", "again", cwd=tmp_path,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    assert "then ×" in again.stdout
    (old,), (new,) = records(tmp_path / "runs" / "one"), records(tmp_path / "runs" / "again")
    assert (old["config_id"], old["cell_id"]) == (new["config_id"], new["cell_id"])
    assert len(results(tmp_path / "runs" / "again")) == 1
