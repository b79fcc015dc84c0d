"""One frame of a sweep, equal from its folder and from a real MLflow store."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest
from analysis_help import controls, make_grid_sweep, product, track
from fake_sweep import make_sweep
from pandas.testing import assert_frame_equal

from analysis.load import frame_of, load, read_curve, typed
from tinydit_ray.record import append_record, read_records
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.results import RESULT_COLUMNS, result_rows

CELLS = product(attention=["manual", "sdpa"], precision=["fp32", "bf16"], lr=[3e-4, 1.0], batch_size=[16, 128])
FAILED = {name: None for name in ("ms_per_step", "speedup_vs_control", "speedup_ci_low", "speedup_ci_high", "flags")}


def odd(record):
    """Rows with words that are empty, hold other letters and lines, and with numbers that are none."""
    if record["config.attention"] == "sdpa" and record["config.precision"] == "bf16":
        reason = "é <b>x</b>\nsecond line, 'quoted' \"twice\"; 50 %"
        return {**FAILED, "status": "failed", "reason": reason, "batch_hash": ""}
    if record["config.lr"] == 1.0:
        return {"status": "diverged", "reason": "loss is inf", "train_loss_last": None, "velocity_mse": None}
    return {"flags": "" if record["round"] == 1 else "few-steps,foreign-load", "timed_steps": 2**40}


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory) -> list[Path]:
    top = tmp_path_factory.mktemp("load") / "runs"
    make_grid_sweep(top / "odd", CELLS, change=odd, rounds=2, content={"created_at": "2026-01-02T00:00:00+00:00"})
    make_grid_sweep(
        top / "plain", product(compile=["off", "default"]), content={"created_at": "2026-01-03T00:00:00+00:00"}
    )
    return [top / "odd", top / "plain"]


@pytest.fixture(scope="module")
def tracked(sweeps, tmp_path_factory):
    """The store that holds both sweeps in the experiment "speed", and the ids of their runs."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store') / 'store.db'}"
    return uri, [track(folder, uri) for folder in sweeps]


def test_the_frame_has_the_records_columns_each_of_its_type(sweeps):
    frame = frame_of(load(sweeps))
    assert list(frame.columns) == list(RESULT_COLUMNS)
    kinds = {int: "Int64", float: "float64", str: "string"}
    assert {name: str(frame[name].dtype) for name in frame} == {
        name: kinds[kind] for name, kind in RESULT_COLUMNS.items()
    }
    assert len(frame) == 2 * 16 + 3 * 2
    assert frame_of([]).columns.equals(frame.columns)


def test_the_controls_row_survives_a_group_by(sweeps):
    frame = frame_of(load(sweeps[:1]))
    axes = [name for name in frame if name.startswith("config.")]
    groups = frame.groupby(axes)  # pandas drops rows with a missing key
    assert groups.size().sum() == len(frame)
    assert controls(CELLS) <= set(groups["config_id"].first())


@pytest.mark.mlflow
def test_mlflow_gives_the_same_frame(sweeps, tracked):
    uri, ids = tracked
    from_folders = load([sweeps[0].parent])
    expected = frame_of(from_folders)
    assert expected["flags"].eq("").any()
    assert expected["flags"].isna().any()
    for targets in (["speed"], ids, ["odd", "plain"]):
        assert_frame_equal(frame_of(load(targets, uri)), expected, rtol=1e-6)  # metrics have seven digits
    found = load(["speed"], uri)
    exact = [name for name, kind in RESULT_COLUMNS.items() if kind is not float]
    assert_frame_equal(frame_of(found)[exact], expected[exact], check_exact=True)
    assert [sweep.content for sweep in found] == [
        json.loads(json.dumps(sweep.content).replace("ann:s3cret", "ann:***")) for sweep in from_folders
    ]
    row = next(row for row in found[1].rows if row["round"] == 1)
    assert found[1].files.curve(row) == from_folders[1].files.curve(row)
    assert found[1].files.samples(row) == from_folders[1].files.samples(row)


@pytest.mark.mlflow
def test_a_sweep_that_has_not_ended_is_pooled_alike_from_both(tracked, tmp_path):
    folder, uri = tmp_path / "open", tracked[0]
    make_grid_sweep(folder, product(precision=["fp32", "bf16"]))
    (folder / "results.parquet").unlink()
    sweep = json.loads((folder / "sweep.json").read_text())
    from tinydit_ray.tracking import Tracker

    tracker = Tracker.open(uri=uri, experiment="open", sweep=sweep, sweep_dir=folder)
    for record in read_records(folder / "records.jsonl"):
        tracker.log_record(record, {})
    tracker.close()
    expected = frame_of(load([folder]))
    assert expected["verdict"].notna().all()
    assert_frame_equal(frame_of(load([tracker.run_id], uri)), expected, rtol=1e-6)


@pytest.mark.mlflow
def test_a_loss_curve_comes_from_the_metrics_history_where_artifacts_are_out_of_reach(sweeps, tracked):
    uri, (_, run_id) = tracked
    place = Path(uri.removeprefix("sqlite:///")).parent
    (place / "mlartifacts").rename(place / "elsewhere")
    try:
        (sweep,) = load([run_id], uri)
        row = sweep.rows[0]
        curve, samples = sweep.files.curve(row), sweep.files.samples(row)
    finally:
        (place / "elsewhere").rename(place / "mlartifacts")
    expected = load([sweeps[1]])[0].files.curve(row)
    assert curve is not None
    assert expected is not None
    assert (curve.steps, curve.losses, curve.seconds) == (expected.steps, expected.losses, None)
    assert samples is None
    assert sweep.content["machine"]["cpu"] == "a processor"


@pytest.mark.mlflow
def test_many_runs_come_page_by_page(sweeps, tracked, monkeypatch):
    from analysis import store

    monkeypatch.setattr(store, "PAGE", 5)  # 32 rounds in seven pages
    assert_frame_equal(frame_of(load(["odd"], tracked[0])), frame_of(load([sweeps[0]])), rtol=1e-6)


def test_results_that_lag_behind_the_records_are_made_anew(tmp_path):
    folder = tmp_path / "resumed"
    rows = make_grid_sweep(folder, product(precision=["fp32", "bf16"]))
    again = {name: value for name, value in rows[0].items() if not name.startswith("speedup_pooled")}
    append_record(folder / "records.jsonl", again | {"attempt": 2, "round": 1, "status": "failed", "reason": "x"})
    (sweep,) = load([folder])
    assert [row["status"] for row in sweep.rows if row["cell_id"] == rows[0]["cell_id"]] == ["failed", "ok", "ok"]
    assert frame_of([sweep]).equals(frame_of([sweep]).assign(**{}))
    expected = result_rows(read_records(folder / "records.jsonl"))
    by_round = {(row["cell_id"], row["round"]): row for row in expected}
    for row in sweep.rows:
        assert row["speedup_pooled"] == by_round[row["cell_id"], row["round"]]["speedup_pooled"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.7976931348623157e308, "", None])
def test_what_is_no_number_is_not_measured(value):
    assert typed({"ms_per_step": value, "timed_steps": None})["ms_per_step"] is None


def test_mixed_types_take_the_columns_type():
    row = typed({"config.dim": "128", "config.lr": 1, "cell_id": 7, "timed_steps": 3.0, "reason": ""})
    assert (row["config.dim"], row["config.lr"], row["cell_id"], row["timed_steps"], row["reason"]) == (
        128, 1.0, "7", 3, "",
    )  # fmt: skip
    assert isinstance(row["config.lr"], float)
    with pytest.raises(UsageError, match=r"column config\.dim: 'wide' is no int"):
        typed({"config.dim": "wide"})


def test_an_older_folder_without_columns_stays_readable(tmp_path):
    folder = tmp_path / "older"
    for record in make_sweep(folder, rounds=1):
        assert record["probe_fd"] is None
    table = pd.DataFrame(read_records(folder / "records.jsonl"))[["cell_id", "round", "attempt", "status", "cell_name"]]
    table.assign(from_the_future=1).to_parquet(folder / "results.parquet")
    frame = frame_of(load([folder]))
    assert list(frame.columns) == list(RESULT_COLUMNS)
    assert len(frame) == 5


def test_what_is_no_sweep_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no sweep folder, and none inside"):
        load([tmp_path])
    with pytest.raises(UsageError, match="there is no such MLflow store"):
        load(["nothing"])
    assert list(tmp_path.iterdir()) == []  # looking makes no store


def test_a_curve_without_seconds_or_with_infinite_losses():
    assert read_curve("step,loss\n1,0.5\n2,inf\n3,0.25\n").losses == [0.5, 0.25]
    assert read_curve("step,loss\n1,0.5\n").seconds is None
    assert read_curve("step,loss,seconds\n1,0.5,2.5\n").seconds == [2.5]
    assert read_curve("nothing") is None
