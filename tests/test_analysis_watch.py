"""``analysis/watch.py``: a sweep that runs, from its folder and through MLflow; and what its own screen shows."""

from __future__ import annotations

import dataclasses
import io
import json
from datetime import UTC, datetime, timedelta

import pytest
from analysis_help import make_grid_sweep, product, script_here
from rich.console import Console

from analysis.watch import SILENT_S, look, shown
from tinydit_ray.record import read_records
from tinydit_ray.sweep.progress import Progress, Working, now

CELLS = product(precision=["fp32", "bf16"], compile=["off", "default"])


@pytest.fixture
def running(tmp_path):
    """A sweep of 4 cells and 2 rounds of which the first 5 rounds are done and one runs."""
    folder = tmp_path / "runs" / "long"
    make_grid_sweep(folder, CELLS, rounds=2)
    (folder / "results.parquet").unlink()
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(lines[:5]))
    work = folder / "cells" / "x" / "r2-a1"
    work.mkdir(parents=True)
    (work / "phase").write_text("timing")
    working = Working(cell="bf16 compile=off", round=2, since_s=10.0, folder="cells/x/r2-a1")
    progress = Progress(total=8, done=5, left_s=300.0, at=now(), working=[working])
    progress.write(folder)
    return folder, progress


def words(seen) -> str:
    console = Console(file=io.StringIO(), width=150, highlight=False)
    console.print(shown(seen))
    return console.file.getvalue()


def test_a_running_sweep_from_its_folder(running):
    folder, progress = running
    text = words(look(str(folder), None))
    assert "5/8 rounds · 5 ok · " in text
    assert "4:5" in text or "5:00 left" in text
    assert "in work: bf16 compile=off · round 2 · timing · for 0:1" in text
    assert "best so far: bf16 compile=default ×" in text
    old = (datetime.now(UTC) - timedelta(seconds=400 + SILENT_S)).isoformat()
    dataclasses.replace(progress, at=old).write(folder)
    assert "it may have been killed" in words(look(str(folder), None))
    dataclasses.replace(progress, ended=True).write(folder)
    assert "ended" in words(look(str(folder), None))
    assert script_here("watch.py", str(folder), cwd=folder).returncode == 0  # it has ended: nothing to wait for


def test_a_round_that_ended_a_moment_ago_is_not_counted_twice(running):
    """The record is there, and the driver has not yet said so."""
    folder, progress = running
    row = read_records(folder / "records.jsonl")[-1]
    place = f"cells/x-{row['cell_id']}/r{row['round']}-a{row['attempt']}"
    late = Working(cell=row["cell_name"], round=row["round"], since_s=10.0, folder=place)
    dataclasses.replace(progress, done=4, working=[late]).write(folder)
    text = words(look(str(folder), None))
    assert "5/8 rounds" in text
    assert "in work" not in text


@pytest.mark.mlflow
def test_the_same_from_another_machine_through_mlflow(running, tmp_path):
    from tinydit_ray.tracking import Tracker

    folder, progress = running
    uri = f"sqlite:///{tmp_path / 'store.db'}"
    content = json.loads((folder / "sweep.json").read_text())
    tracker = Tracker.open(uri=uri, experiment="speed", sweep=content, sweep_dir=folder)
    for record in read_records(folder / "records.jsonl"):
        tracker.log_record(record, {})
    tracker.tell(progress.to_json())
    tracker.close()
    here, there = (words(look(*target)).splitlines() for target in ((str(folder), None), ("long", uri)))
    assert len(here) == len(there) == 5
    assert here[2].split(" · ")[:2] == there[2].split(" · ")[:2]  # the seconds left may differ
    assert "in work: bf16 compile=off · round 2 · for 0:1" in there[3]
    assert here[4] == there[4]
    check_that_a_new_run_has_not_ended(uri)


def check_that_a_new_run_has_not_ended(uri):
    """Its run is there, and not yet what it is to do: who follows it must not be sent away."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("speed").experiment_id
    run = client.create_run(experiment, run_name="new", tags={"run_kind": "sweep", "sweep_id": "s1"})
    seen = look("new", uri)
    assert not seen.ended
    assert "0/0 rounds · no round has ended · it is being started" in words(seen)
    client.set_terminated(run.info.run_id, "KILLED")
    assert look("new", uri).ended


def test_what_is_no_progress_is_none(tmp_path):
    for text in ("", "{", "[]", '{"total": 1}', '{"working": [{"cell": 1}]}'):
        assert Progress.from_json(text) is None
    folder = tmp_path / "old"
    make_grid_sweep(folder, CELLS[:1], rounds=1)
    assert look(str(folder), None).ended
