"""What a person gets wrong on the command line: one line, exit status 2, and nothing was started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sweep_help import ROOT, TINY, sweep, sweep_here

MISTAKES = {
    "unknown axis": (["--set", "attentoin=sdpa"], "did you mean 'attention'"),
    "unknown value": (["--set", "attention=spda"], "did you mean 'sdpa'"),
    "not a number": (["--set", "batch_size=many"], "batch_size: 'many' is not a whole number"),
    "zero": (["--set", "batch_size=0"], "at least 1"),
    "no value": (["--set", "attention"], "written as axis=value"),
    "given twice": (["--set", "attention=sdpa", "--set", "attention=manual"], "given twice"),
    "heads": (["--set", "dim=10", "--set", "heads=4"], "not divisible by heads 4"),
    "no such grid": (["--grid", "publishd"], "published"),
    "no such grid file": (["--grid", "nowhere.yaml"], "cannot be read"),
    "no such data": (["--data", "nowhere"], "nowhere"),
    "no such option": (["--rouns", "3"], "unrecognized arguments: --rouns"),
    "rounds": (["--rounds", "0"], "at least 1"),
    "time": (["--time", "-3"], "not a number above 0"),
    "ci": (["--ci", "2"], "not a fraction below 1"),
    "timeout": (["--cell-timeout", "soon"], "not a duration"),
    "too many CPUs": (["--cpus-per-worker", "4096", *TINY], "--cpus-per-worker 4096: this machine has"),
    "a name with a slash": (["--name", "../evil", "--no-ray", *TINY], "plain folder name"),
    "nothing to resume": (["--resume", "never-was", "--no-ray", *TINY], "there is no sweep"),
    "classes": (["--classes", "1,x"], "classes"),
    "a grid of 100,000 cells": (["--set", f"seed={','.join(map(str, range(400)))}",
                                 "--set", f"batch_size={','.join(map(str, range(1, 251)))}"], "100,000 cells; --yes"),
    "an option without effect": (["--set", "inductor=epilogue-fusion"], "no effect while compile is off"),
    "too many workers": (
        ["--set", "workers=16", "--cpus-per-worker", "2", *TINY], "workers 16 of 2 CPUs each: this machine has"
    ),
    "a batch of more images than there are": (
        ["--set", "batch_size=128,20000", "--data", "shapes", "--no-ray"],
        "batch_size 20000: there are 10000 training images; possible: up to 10000",
    ),
    "control": (["--control", "precision=fp31", *TINY], "precision"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line(mistake: str, tmp_path: Path) -> None:
    arguments, part = MISTAKES[mistake]
    done = sweep_here("speed_grid.py", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert part in line
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/*/records.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--set", "attention=spda"], ["--dry-run", "--data", "shapes"]])
def test_a_process_of_its_own_prints_the_same_as_these_tests_see(arguments: list[str], tmp_path: Path) -> None:
    real, here = (run("speed_grid.py", *arguments, cwd=tmp_path) for run in (sweep, sweep_here))
    assert (real.returncode, real.stderr) == (here.returncode, here.stderr)
    assert re.sub(r"after [\d.]+ s", "", real.stdout) == re.sub(r"after [\d.]+ s", "", here.stdout)
    assert real.returncode == (0 if "--dry-run" in arguments else 2)
    assert not list(tmp_path.iterdir())


GRIDS = {
    "a key twice": ("axes: {attention: [sdpa]}\naxes: {attention: [manual]}\n", "given twice"),
    "unknown key": ("axis: {attention: [sdpa]}\n", "did you mean 'axes'"),
    "empty": ("", "map"),
    "empty list": ("axes: {attention: []}\n", "empty"),
    "a number where a word belongs": ("axes: {attention: [3]}\n", "not a word"),
    "all excluded": ("axes: {attention: [sdpa]}\nexclude: [{attention: sdpa}]\n", "every cell is excluded"),
    "not yaml": ("axes: {attention: [sdpa\n", "not YAML"),
}


@pytest.mark.parametrize("mistake", GRIDS)
def test_a_mistake_in_a_grid_file_names_the_file(mistake: str, tmp_path: Path) -> None:
    text, part = GRIDS[mistake]
    (tmp_path / "my grid.yaml").write_text(text)
    done = sweep_here("speed_grid.py", "--grid", "my grid.yaml", *TINY[4:], cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert part in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.mlflow
def test_a_tracking_store_that_cannot_be_reached_is_said_before_any_trial(tmp_path: Path) -> None:
    done = sweep(
        "speed_grid.py", *TINY, "--no-ray", "--name", "x", "--tracking-uri", "http://127.0.0.1:9", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "--tracking-uri" in done.stderr
    assert not (tmp_path / "runs/x").exists()  # the same name can be used again


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "thesis.txt").write_text("precious")
    done = sweep_here("speed_grid.py", *TINY, "--no-ray", "--name", "mine", cwd=tmp_path)
    assert done.returncode == 2
    assert "holds other files" in done.stderr
    assert (tmp_path / "runs" / "mine" / "thesis.txt").read_text() == "precious"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = sweep_here("speed_grid.py", *TINY, "--no-ray", "--out", "file", cwd=tmp_path)
    assert done.returncode == 2
    assert "--out file" in done.stderr


def test_dry_run_prints_the_five_published_cells_and_starts_nothing(tmp_path: Path) -> None:
    done = sweep_here("speed_grid.py", "--dry-run", "--data", "shapes", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("manual fp32 compile=off", "sdpa fp32 compile=off", "sdpa bf16 compile=off",
                 "sdpa fp32 compile=default", "sdpa bf16 compile=default"):  # fmt: skip
        assert name in done.stdout
    assert "about" in done.stdout
    assert not list(tmp_path.iterdir())


def test_every_script_has_help(tmp_path: Path) -> None:
    for script in sorted((ROOT / "sweeps").glob("*.py")):
        done = sweep_here(script.name, "--help", cwd=tmp_path)
        assert done.returncode == 0, script
        assert "--grid" in done.stdout
