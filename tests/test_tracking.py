"""What a record becomes in MLflow, tracking URIs and a sweep's files: without MLflow."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from fake_sweep import START, make_sweep, record_of, sweep_of, write_files

from tinydit_ray.config import AXES, from_mapping
from tinydit_ray.tracking import TrackingError, absolute_uri, files_of, mask, mask_text, parent, summary_files
from tinydit_ray.tracking.files import loss_points
from tinydit_ray.tracking.split import metrics_of, record_key, run_name, run_of, run_status
from tinydit_ray.tracking.store import one_line
from tinydit_ray.tracking.uri import sqlite_path
from tinydit_ray.tracking.view import colour_tags, how_to_open

CELL = from_mapping({"attention": "sdpa", "precision": "bf16"})


def record(**changes):
    return record_of(CELL, sweep_id="s1") | changes


def test_settings_are_params_numbers_are_metrics_and_the_rest_are_tags():
    run = run_of(record(), {})
    assert set(run.params) == {f"config.{name}" for name in (*AXES, "model")}
    assert run.params["config.attention"] == "sdpa"
    names = [name for name, _, _ in run.metrics]
    assert names[:2] == ["ms_per_step", "velocity_mse"]  # what is looked for first stands first
    assert {"peak_rss_mb", "timed_steps", "orchestration_s"} <= set(names)
    assert run.tags["effective.threads"] == "2"
    assert run.tags["data_source"] == "shapes"
    assert run.tags["flags"] == "few-steps"
    assert not set(names) & set(run.tags)
    assert not set(run.params) & set(run.tags)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_a_number_that_is_none_or_not_finite_is_no_metric(value):
    assert "ms_per_step" not in dict(metrics_of(record(ms_per_step=value)))
    assert "ms_per_step" not in run_of(record(ms_per_step=value), {}).tags


def test_metrics_keep_seven_digits():
    (_, value), *_ = metrics_of(record(ms_per_step=43.34241207))
    assert value == 43.34241
    assert value == pytest.approx(43.34241207, rel=1e-6)


def test_columns_of_a_newer_schema_find_their_place():
    run = run_of(record(watts=41.5, cooler="water"), {})
    assert ("watts", 41.5, 0) in run.metrics
    assert run.tags["cooler"] == "water"


@pytest.mark.parametrize(
    ("status", "expected"),
    [("ok", "FINISHED"), ("unsupported", "FINISHED"), ("skipped", "FINISHED"), ("killed", "KILLED")]
    + [(status, "FAILED") for status in ("oom", "timeout", "diverged", "failed")],
)
def test_state_of_a_run(status, expected):
    assert run_status({"status": status}) == expected


def test_run_name_says_the_setup_first():
    assert (
        run_name({"cell_name": "sdpa bf16", "round": 1, "attempt": 1, "status": "ok"})
        == "sdpa bf16 · round 1"
    )
    again = {"cell_name": "sdpa", "round": 2, "attempt": 3, "repeat": 1, "status": "oom"}
    assert run_name(again) == "sdpa · repeat 1 · round 2 · attempt 3 · oom"


def test_times_of_a_run_are_the_rounds(tmp_path):
    one = record_of(CELL, sweep_id="s1", number=3)
    started = (START.timestamp() + 3 * 300) * 1000
    run = run_of(one, {})
    assert run.start_ms == started
    assert run.end_ms == started + 1000 * (0.1 + 6.0 + 7.2)  # first step, window, orchestration
    log = tmp_path / "log.txt"
    log.write_text("x")
    os.utime(log, (0, started / 1000 + 60))
    assert run_of(one, {"log.txt": log}).end_ms == started + 60_000


def test_loss_curve_becomes_one_metric_by_step(tmp_path):
    curve = tmp_path / "loss.csv"
    curve.write_text("step,wall_s,train_loss\n0,0.1,1.5\n10,0.2,nan\n20,0.3,0.5\n20,0.4,0.4\nbroken\n")
    assert [point for point in run_of(record(), {"loss.csv": curve}).metrics if point[0] == "train_loss"] == [
        ("train_loss", 1.5, 0),
        ("train_loss", 0.5, 20),
    ]


def test_a_long_loss_curve_is_thinned_evenly_with_both_ends(tmp_path):
    curve = tmp_path / "loss.csv"
    curve.write_text("step,loss\n" + "".join(f"{step},{1 / (1 + step)}\n" for step in range(6000)))
    steps = [step for step, _ in loss_points(curve, most=100)]
    assert len(steps) == len(set(steps)) == 100
    assert (steps[0], steps[-1]) == (0, 5999)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 61


def test_the_reason_is_shown_and_long_words_are_cut():
    run = run_of(record(status="failed", reason="x" * 9000), {})
    assert run.tags["mlflow.note.content"].startswith("**failed**: xxx")
    assert all(len(value) <= 5000 for value in run.tags.values())


def test_passwords_are_masked_wherever_they_stand():
    assert mask_text("see http://ann:s3cret@host:5000/x") == "see http://ann:***@host:5000/x"
    assert mask_text("http://ann:p@ss:w@host") == "http://ann:***@host"
    assert (
        mask_text("postgresql://h/db?user=a&password=s3cret&x=1")
        == "postgresql://h/db?user=a&password=***&x=1"
    )
    assert mask_text('{"a": "http://h:5000", "b": "me@there"}') == '{"a": "http://h:5000", "b": "me@there"}'
    assert mask({"uri": ["mysql+pymysql://u:s3cret@h/db", 3]}) == {"uri": ["mysql+pymysql://u:***@h/db", 3]}
    run = run_of(record(reason="http://ann:s3cret@h failed", status="failed"), {})
    assert "s3cret" not in str(run)
    assert "s3cret" not in str(parent.sweep_tags(sweep_of(Path("x"))))
    assert "ann:***@example.org" in parent.sweep_tags(sweep_of(Path("x")))["command"]


@pytest.mark.parametrize(
    ("uri", "hint"),
    [
        ("file:///tmp/mlruns", "old file store"),
        ("./mlruns", "old file store"),
        ("sqlite://", "memory"),
        ("sqlite:///:memory:", "memory"),
        ("sqlite:///a?b.db", "cannot hold"),
        ("ftp://host/x", "no kind of store"),
        ("http://", "no host"),
        ("http://host:99999", "valid port"),
        ("http://ann:***@host:5000", "masked"),
    ],
)
def test_uris_that_cannot_work_are_refused_in_one_line(uri, hint, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD", raising=False)
    with pytest.raises(TrackingError, match=hint) as caught:
        absolute_uri(uri)
    assert "\n" not in str(caught.value)


def test_the_default_store_is_here_and_absolute(tmp_path, monkeypatch):
    here = tmp_path / "été 50%20 off"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert sqlite_path(absolute_uri(None)) == here / "mlflow.db"
    assert absolute_uri(absolute_uri(None)) == absolute_uri(None)
    assert sqlite_path(absolute_uri("sqlite:///sub/x.db")) == here / "sub" / "x.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000/")
    assert absolute_uri(None) == "http://host:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cret")
    assert absolute_uri("http://ann:***@host:5000") == "http://host:5000"


def test_files_of_a_round(tmp_path):
    one = record()
    place = write_files(tmp_path, one)
    (place / "checkpoint.pt").write_bytes(b"large")
    (place / "phase").write_text("timing")
    (place / "stolen.txt").symlink_to("/etc/hostname")
    write_files(tmp_path, one | {"attempt": 2})
    found = files_of(tmp_path, one)
    assert set(found) == {"log.txt", "record.json", "steps.npz", "loss.csv", "samples.png"}
    assert found["loss.csv"] == place / "loss.csv"
    repeated = place.with_name("rep2-r1-a1")
    place.rename(repeated)
    assert files_of(tmp_path, one) == {}
    assert files_of(tmp_path, one | {"repeat": 2})["log.txt"] == repeated / "log.txt"
    assert files_of(tmp_path, one | {"cell_id": "../*"}) == {}


def test_files_of_the_sweep(tmp_path):
    make_sweep(tmp_path / "s", rounds=1)
    (tmp_path / "s" / "plots").mkdir()
    (tmp_path / "s" / "plots" / "speed.png").write_bytes(b"x")
    assert set(summary_files(tmp_path / "s")) == {"sweep.json", "plots/speed.png"}


def test_only_a_cell_that_is_faster_can_be_the_best():
    table = pd.DataFrame(
        [
            {"cell_id": "a", "speedup_pooled": 1.7, "verdict": "faster", "quality_verdict": None},
            {"cell_id": "b", "speedup_pooled": 3.0, "verdict": "too noisy", "quality_verdict": math.nan},
            {"cell_id": "a", "speedup_pooled": 1.7, "verdict": "faster", "quality_verdict": None},
        ]
    )
    pooled = parent.pooled_of(table)
    assert pooled == {
        "a": ({"speedup_pooled": 1.7}, {"verdict": "faster"}),
        "b": ({"speedup_pooled": 3.0}, {"verdict": "too noisy"}),
    }
    numbers, words = parent.outcome(pooled, {"a": "sdpa bf16"})
    assert numbers == {"best_speedup_pooled": 1.7}
    assert words["verdict"] == "1.70× with sdpa bf16"
    del pooled["a"]
    assert parent.outcome(pooled, {}) == ({}, {"verdict": "none is faster than the control"})
    worse = {"a": ({"speedup_pooled": 1.7}, {"verdict": "faster", "quality_verdict": "worse"})}
    assert parent.outcome(worse, {}) == ({}, {"verdict": "none is faster than the control at no worse quality"})
    assert parent.outcome({"a": ({"ms_per_step_pooled": 9.0}, {})}, {}) == ({}, {})
    assert parent.pooled_of(None) == {}


def test_rounds_are_counted_by_their_last_attempt():
    statuses = {"a/0/1/1": "failed", "a/0/1/2": "ok", "a/0/1/10": "oom", "b/0/1/1": "ok"}
    assert parent.counts(statuses) == {"ok": 1, "oom": 1}


def test_a_setup_has_one_colour_in_charts_and_another_setup_another():
    sweep = {"grid": {"cells": [{"cell_id": name} for name in ("a", "b", "c")]}}
    colours = [colour_tags(sweep, {"cell_id": name, "round": 1})["mlflow.runColor"] for name in ("a", "b", "c")]
    assert len(set(colours)) == 3
    assert colour_tags(sweep, {"cell_id": "b", "round": 2})["mlflow.runColor"] == colours[1]
    assert colour_tags(sweep, {"cell_id": "of another grid"}) == colour_tags({}, {"cell_id": "a"}) == {}


def test_a_server_is_opened_by_its_address_and_a_file_by_the_ui_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    link = how_to_open("http://ann:***@example.org:5000", "7")
    assert link.startswith("open http://example.org:5000/#/experiments/7/runs?workflowType=machine_learning")
    here, there = f"sqlite:///{tmp_path}/mlflow.db", "sqlite:////srv/mlflow.db"
    command = "python -m tinydit_ray.tracking ui --tracking-uri"
    assert how_to_open(here, "1") == f"open it with: make ui, or {command} '{here}'"
    assert how_to_open(there, "1") == f"open it with: {command} '{there}'"


def test_the_description_of_a_sweep_begins_with_its_table(tmp_path):
    table, other = "| setup |\n|---|\n| sdpa |", "| setup |\n|---|\n| bf16 |"
    path = tmp_path / "summary.md"
    path.write_text(f"### s\n\n- **machine**: two\n\n{table}\n\nIt is not FID.\n")
    assert parent.note({"summary.md": path}) == f"{table}\n\n### s\n\n- **machine**: two\n\nIt is not FID.\n"
    path.write_text(f"### s\n\nhere\n\n{table}\n\nthere\n\n{other}\n")  # each table below its own words
    assert parent.note({"summary.md": path}) == path.read_text()


def test_the_key_tells_rounds_and_attempts_apart():
    keys = {record_key(record(**change)) for change in ({}, {"round": 2}, {"attempt": 2}, {"repeat": 1})}
    assert len(keys) == 4


def test_it_imports_without_mlflow_and_says_what_to_install(tmp_path):
    """Everything that needs no store works where MLflow is missing."""
    code = (
        "import sys; sys.modules['mlflow'] = None\n"
        "from pathlib import Path\n"
        "import tinydit_ray.tracking as t\n"
        "t.NullTracker().log_record({}, {})\n"
        "sweep = {'sweep_id': 's', 'name': 'n'}\n"
        "try: t.Tracker.open(uri=None, experiment='x', sweep=sweep, sweep_dir=Path('.'))\n"
        "except t.TrackingError as error: print(error)\n"
    )
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'tinydit-ray[mlflow]'" in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Max retries exceeded (Caused by NewConnectionError('[Errno 111] Connection refused'))", "connection refused"),
        ("('Connection aborted.', ConnectionRefusedError(111, 'Connection refused'))", "connection refused"),
        ("ProtocolError('Connection aborted.', RemoteDisconnected('Remote end closed'))", "the connection broke off"),
        ("ConnectionResetError(104, 'Connection reset by peer')", "the connection broke off"),
        ("HTTPConnectionPool: Read timed out. (read timeout=5)", "no answer in time"),
        ("(sqlite3.OperationalError) database is locked", "another program holds the store locked"),
    ],
)
def test_what_a_lost_server_says_is_put_in_a_few_words(said, words):
    assert one_line(OSError(said)) == words
