"""A sweep in a real MLflow SQLite store: what is there, what stays single, what is refused."""

from __future__ import annotations

import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from fake_sweep import SETUPS, START, make_sweep, record_of, summarise, write_files
from tracking_help import children, command, parents, python, runs_in, state, sweep_json

from tinydit_ray.config import from_mapping
from tinydit_ray.record import append_record
from tinydit_ray.tracking import Tracker, TrackingError, files_of, summary_files
from tinydit_ray.tracking.sync import sync

pytestmark = pytest.mark.mlflow


@pytest.fixture(autouse=True)
def _no_uri_from_outside(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    """One store for the tests that do not need their own."""
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'shared.db'}"


def open_tracker(folder: Path, uri: str | None, experiment: str = "speed") -> Tracker:
    return Tracker.open(uri=uri, experiment=experiment, sweep=sweep_json(folder), sweep_dir=folder)


def of_sweep(uri: str, folder: Path, experiment: str = "speed"):
    wanted = sweep_json(folder)["sweep_id"]
    return [run for run in runs_in(uri, experiment) if run.data.tags["sweep_id"] == wanted]


def test_a_sweep_is_a_parent_run_with_a_child_per_cell_and_round(tmp_path, monkeypatch):
    here = tmp_path / "été 50%20 off"  # a space, a letter beyond ASCII, and what looks like a URL's escape
    folder = here / "runs" / "speed grid"
    records = make_sweep(folder, rounds=2)
    monkeypatch.chdir(here)

    tracker = open_tracker(folder, None)
    assert tracker.uri == f"sqlite:///{here}/mlflow.db".replace("%", "%25")
    for record in records:
        tracker.log_record(record, files_of(folder, record))
    table = summarise(folder, records)
    tracker.finish(status="FAILED", summary=summary_files(folder), pooled=table)
    assert tracker.warnings == []

    runs = of_sweep(tracker.uri, folder)
    (parent,), rounds = parents(runs), {run.info.run_name: run for run in children(runs)}
    assert parent.info.run_id == tracker.run_id
    assert {run.data.tags["mlflow.parentRunId"] for run in rounds.values()} == {tracker.run_id}
    assert len(rounds) == len(children(runs)) == 10
    assert rounds["sdpa fp32 compile=default · round 1 · failed"].info.status == "FAILED"
    check_round(rounds["sdpa bf16 compile=off · round 1"], records[2], table)
    check_parent(parent, here)
    assert (here / "mlflow.db").is_file()
    assert not (here / "mlruns").exists()
    assert b"s3cret" not in (here / "mlflow.db").read_bytes()
    stored = [path for path in (here / "mlartifacts").rglob("*") if path.is_file()]
    assert {"samples.png", "steps.npz", "sweep.json", "results.parquet"} <= {path.name for path in stored}
    assert not any(b"s3cret" in path.read_bytes() for path in stored)


def check_round(run, record, table):
    assert run.info.status == "FINISHED"
    assert run.info.start_time == (START.timestamp() + 600) * 1000
    assert run.info.end_time >= run.info.start_time
    assert run.data.params["config.precision"] == "bf16"
    assert {name for name in run.data.params if not name.startswith("config.")} == set()
    assert run.data.metrics["ms_per_step"] == pytest.approx(record["ms_per_step"], rel=1e-6)
    assert "probe_fd" not in run.data.metrics  # was not measured
    row = table[table["cell_id"] == record["cell_id"]].iloc[0]
    assert run.data.metrics["speedup_pooled"] == pytest.approx(row["speedup_pooled"], rel=1e-6)
    assert run.data.tags["verdict"] == "faster"
    (data,) = run.inputs.dataset_inputs
    assert data.dataset.name == "shapes"
    assert record["data_digest"].startswith(data.dataset.digest)


def check_parent(run, here):
    assert (run.info.run_name, run.info.status) == ("speed grid", "FAILED")
    assert run.info.end_time >= run.info.start_time == START.timestamp() * 1000
    assert run.data.params["axes.attention"] == "manual, sdpa"
    assert run.data.tags["machine.cpu"] == "a processor"
    assert run.data.tags["versions.torch"] == "2.9.0"
    assert run.data.tags["product_version"] == "0.1.0"
    assert run.data.metrics["rounds_failed"] == 1
    assert run.data.tags["best_cell"] == "sdpa bf16 compile=off"
    assert run.data.tags["mlflow.note.content"].startswith("| setup")
    assert run.info.artifact_uri.startswith(here.as_uri() + "/mlartifacts/")


def test_the_loss_curve_is_there_once(tmp_path, uri):
    from mlflow import MlflowClient

    folder = tmp_path / "curve"
    (record,) = make_sweep(folder, rounds=1, setups=SETUPS[:1])
    tracker = open_tracker(folder, uri)
    tracker.log_record(record, files_of(folder, record))
    tracker.log_record(record, files_of(folder, record))
    assert len(children(of_sweep(uri, folder))) == 1
    tracker.finish(status="FINISHED", summary={}, pooled=None)
    (run,) = children(of_sweep(uri, folder))
    history = MlflowClient(tracking_uri=uri).get_metric_history(run.info.run_id, "train_loss")
    assert [point.step for point in history] == list(range(0, 101, 5))


def test_a_resumed_sweep_goes_on_in_its_run(tmp_path, uri):
    folder = tmp_path / "resumed"
    records = make_sweep(folder, rounds=1)
    first = open_tracker(folder, uri)
    for record in records[:3]:
        first.log_record(record, {})
    first.finish(status="KILLED", summary={}, pooled=None)  # sends the other two, which are in records.jsonl
    before = {run.info.run_id for run in children(of_sweep(uri, folder))}
    assert len(before) == 5

    sweep = sweep_json(folder)
    sweep["grid"]["steps"] = 200  # an edited grid; MLflow's params can never change
    second = Tracker.open(uri=uri, experiment="speed", sweep=sweep, sweep_dir=folder)
    assert second.run_id == first.run_id
    assert second.run().info.status == "RUNNING"
    retried = records[3] | {"attempt": 2, "status": "ok"}
    for record in (*records, retried):
        second.log_record(record, {})
    second.finish(status="FINISHED", summary={}, pooled=None)
    runs = of_sweep(uri, folder)
    (parent,) = parents(runs)
    assert before < {run.info.run_id for run in children(runs)}
    assert len(children(runs)) == 6
    assert (parent.info.status, parent.data.params["steps"], parent.data.tags["changed.steps"]) == (
        "FINISHED",
        "100",
        "200",
    )


KILLED = """
import os, signal, sys
from pathlib import Path
from tracking_help import sweep_json
from tinydit_ray.record import read_records
from tinydit_ray.tracking import Tracker, files_of
from tinydit_ray.tracking.split import record_key
folder = Path(sys.argv[1])
tracker = Tracker.open(uri=sys.argv[2], experiment="speed", sweep=sweep_json(folder), sweep_dir=folder)
records = read_records(folder / "records.jsonl")
for record in records[:2]:
    tracker.log_record(record, files_of(folder, record))
half = {"mlflow.parentRunId": tracker.run_id, "run_kind": "round"}
tracker._runs.create("half", 1, half | {"record_key": record_key(records[2])})
tracker._runs.create("twin", 1, half | {"record_key": record_key(records[2])})
tracker._runs.create("without a record", 1, half | {"record_key": "gone/0/1/1"})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_sync_sends_what_a_killed_driver_left_and_twice_changes_nothing(tmp_path, uri):
    folder = tmp_path / "killed"
    make_sweep(folder, rounds=1)
    driver = python(KILLED, str(folder), uri, cwd=tmp_path)
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == -signal.SIGKILL, output

    done = command("sync", str(folder), "--tracking-uri", uri, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 of 5 records sent, 0 missing; the sweep is KILLED" in done.stdout
    runs = of_sweep(uri, folder)
    (parent,), rounds = parents(runs), children(runs)
    assert parent.info.status == "KILLED"
    assert parent.info.end_time
    assert sorted(run.data.tags["record_key"] for run in rounds if "status" in run.data.tags) == sorted(
        {run.data.tags["record_key"] for run in rounds} - {"gone/0/1/1"}
    )
    assert len(rounds) == 6
    assert {run.info.status for run in rounds} == {"FINISHED", "FAILED", "KILLED"}
    assert all(run.info.end_time for run in rounds)

    before = state(uri)
    assert sync(folder, uri).sent == 0
    assert state(uri) == before


def test_a_search_goes_past_the_first_page(tmp_path, uri, monkeypatch):
    monkeypatch.setattr("tinydit_ray.tracking.runs.PAGE", 2)
    folder = tmp_path / "pages"
    records = make_sweep(folder, rounds=1)
    tracker = open_tracker(folder, uri)
    for record in records:
        tracker.log_record(record, {})
    tracker.close()
    again = open_tracker(folder, uri)
    assert again.send_missing(records) == 0
    again.close()
    assert len(children(of_sweep(uri, folder))) == 5


def test_a_record_that_mlflow_refuses_holds_up_no_other(tmp_path, uri):
    folder = tmp_path / "refused"
    first, second, third = make_sweep(folder, rounds=1, setups=SETUPS[:3])
    tracker = open_tracker(folder, uri)
    odd = {
        "run_kind": "round",
        "record_key": f"{second['cell_id']}/0/1/1",
        "mlflow.parentRunId": tracker.run_id,
    }
    run_id = tracker._runs.create("odd", 1, odd)
    tracker._runs.client.log_param(run_id, "config.attention", "another")  # params can never change
    tracker.close()

    tracker = open_tracker(folder, uri)
    for record in (first, second, third):
        tracker.log_record(record, {})
    assert tracker.unsent == 1
    assert [("did not take a record" in warning) for warning in tracker.warnings] == [True]
    tracker.finish(status="FINISHED", summary={}, pooled=None)
    runs = of_sweep(uri, folder)
    assert {run.data.tags["cell_id"] for run in children(runs) if run.info.run_id != run_id} == {
        first["cell_id"],
        third["cell_id"],
    }
    assert parents(runs)[0].info.status == "FINISHED"


def test_files_that_cannot_be_stored_lose_no_numbers(tmp_path):
    folder = tmp_path / "full"
    (record,) = make_sweep(folder, rounds=1, setups=SETUPS[:1])
    tracker = open_tracker(folder, f"sqlite:///{tmp_path}/a.db")
    artifacts = tmp_path / "mlartifacts" / "speed"
    artifacts.rename(artifacts.with_name("away"))
    artifacts.write_text("a file where the folder should be")
    tracker.log_record(record, files_of(folder, record))
    assert "took no files" in tracker.warnings[0]
    (run,) = children(of_sweep(tracker.uri, folder))
    assert run.info.status == "FINISHED"
    assert run.data.metrics["ms_per_step"] > 0
    tracker.close()


def test_only_one_process_writes_a_sweeps_runs(tmp_path, uri):
    folder = tmp_path / "held"
    make_sweep(folder, rounds=1, setups=SETUPS[:1])
    tracker = open_tracker(folder, uri)
    done = command("sync", str(folder), "--tracking-uri", uri, cwd=tmp_path)
    tracker.close()
    assert (done.returncode, done.stdout) == (2, "")
    assert "another process tracks this sweep right now" in done.stderr
    assert done.stderr.count("\n") == 1


OPEN = """
import os, sys, time
from pathlib import Path
from fake_sweep import make_sweep
from tracking_help import sweep_json
from tinydit_ray.tracking import Tracker, files_of
from tinydit_ray.tracking.store import import_mlflow
folder = Path(sys.argv[1])
records = make_sweep(folder, rounds=1)[:2]
import_mlflow()
(folder / "ready").touch()
deadline = time.monotonic() + 90
while not Path("go").exists():
    assert time.monotonic() < deadline, "nobody said go"
    time.sleep(0.005)
tracker = Tracker.open(uri=None, experiment="speed", sweep=sweep_json(folder), sweep_dir=folder)
for record in records:
    tracker.log_record(record, files_of(folder, record))
tracker.finish(status="FINISHED", summary={}, pooled=None)
assert not tracker.warnings, tracker.warnings
assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
"""


def test_sweeps_started_together_share_a_store_and_print_nothing(tmp_path):
    folders = [tmp_path / f"s{i}" for i in range(2)]
    drivers = [python(OPEN, str(folder), cwd=tmp_path) for folder in folders]
    deadline = time.monotonic() + 60
    while not all((folder / "ready").exists() for folder in folders) and time.monotonic() < deadline:
        time.sleep(0.02)
    (tmp_path / "go").touch()
    outputs = [driver.communicate(timeout=120)[0] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0], outputs
    assert outputs == ["", ""]
    runs = runs_in(f"sqlite:///{tmp_path}/mlflow.db")
    assert {run.info.run_name for run in parents(runs)} == {"s0", "s1"}
    assert len(children(runs)) == 10
    assert not list(tmp_path.glob(".mlflow.db*.new*"))


def older_store(path: Path) -> None:
    """A store with the schema of an older MLflow, made by MLflow's own migrations."""
    import sqlalchemy
    from alembic import command as alembic
    from mlflow.store.db import utils

    engine = sqlalchemy.create_engine(f"sqlite:///{path}")
    utils.InitialBase.metadata.create_all(engine)
    config = utils._get_alembic_config(str(engine.url))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        alembic.upgrade(config, "acf3f17fdcc7")
    engine.dispose()


def newer_store(path: Path) -> None:
    older_store(path)
    with closing(sqlite3.connect(path)) as store, store:
        store.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")


def other_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as store, store:
        store.execute("CREATE TABLE songs (title TEXT)")


def no_database(path: Path) -> None:
    path.write_text("dear diary" * 200)


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (older_store, "made by an older MLflow: copy the file as a backup, then run `mlflow db upgrade"),
        (newer_store, "made by a newer MLflow"),
        (other_database, "but not MLflow's"),
        (no_database, "not a database"),
    ],
)
def test_a_file_that_is_no_store_of_this_mlflow_is_refused_and_left_alone(tmp_path, make, hint):
    folder, path = tmp_path / "s", tmp_path / "old.db"
    make_sweep(folder, rounds=1, setups=SETUPS[:1])
    make(path)
    before = path.read_bytes()
    with pytest.raises(TrackingError) as caught:
        open_tracker(folder, f"sqlite:///{path}")
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_a_deleted_experiments_name_is_refused_with_what_to_do(tmp_path, uri):
    from mlflow import MlflowClient

    folder = tmp_path / "gone"
    make_sweep(folder, rounds=1, setups=SETUPS[:1])
    tracker = open_tracker(folder, uri, "short-lived")
    tracker.finish(status="FINISHED", summary={}, pooled=None)
    client = MlflowClient(tracking_uri=uri)
    client.delete_experiment(tracker.experiment_id)
    with pytest.raises(
        TrackingError, match=rf"restore --experiment-id {tracker.experiment_id}.*--experiment"
    ):
        open_tracker(folder, uri, "short-lived")
    client.restore_experiment(tracker.experiment_id)
    open_tracker(folder, uri, "short-lived").close()  # and the sweep was let go of


def test_a_deleted_sweeps_run_is_not_written_to(tmp_path, uri):
    from mlflow import MlflowClient

    folder = tmp_path / "deleted"
    make_sweep(folder, rounds=1, setups=SETUPS[:1])
    tracker = open_tracker(folder, uri)
    tracker.close()
    MlflowClient(tracking_uri=uri).delete_run(tracker.run_id)
    with pytest.raises(TrackingError, match="was deleted in MLflow"):
        open_tracker(folder, uri)


def test_a_store_that_cannot_be_written_is_refused(tmp_path):
    folder = tmp_path / "s"
    make_sweep(folder, rounds=1, setups=SETUPS[:1])
    with pytest.raises(TrackingError, match="tracking store"):
        open_tracker(folder, f"sqlite:///{folder}/sweep.json/mlflow.db")


@pytest.fixture
def impatient():
    """MLflow waits 20 s for a locked database; here half a second."""
    import sqlalchemy

    @sqlalchemy.event.listens_for(sqlalchemy.Engine, "before_cursor_execute", retval=True)
    def shorten(connection, cursor, statement, parameters, context, many):
        return statement.replace("busy_timeout = 20000", "busy_timeout = 500"), parameters

    yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", shorten)


def test_a_locked_store_delays_one_record_and_loses_none(tmp_path, impatient):
    folder = tmp_path / "locked"
    records = make_sweep(folder, rounds=1)
    tracker = open_tracker(folder, f"sqlite:///{tmp_path}/a.db")
    writer = sqlite3.connect(tmp_path / "a.db", isolation_level=None, check_same_thread=False)
    writer.execute("BEGIN IMMEDIATE")
    tracker.log_record(records[0], {})
    start = time.monotonic()
    tracker.log_record(records[1], {})
    assert time.monotonic() - start < 0.1
    assert tracker.unsent == 2
    assert ["holds the store locked" in warning for warning in tracker.warnings] == [True]
    writer.rollback()
    writer.close()
    tracker.finish(status="FINISHED", summary={}, pooled=None)
    assert tracker.unsent == 0
    assert len(children(of_sweep(tracker.uri, folder))) == 5
    assert "database is locked" in (folder / "mlflow.log").read_text()


def test_an_attempt_is_a_run_of_its_own(tmp_path, uri):
    folder = tmp_path / "attempts"
    make_sweep(folder, rounds=1, setups=())
    tracker = open_tracker(folder, uri)
    for attempt, status in ((1, "timeout"), (2, "ok")):
        record = record_of(from_mapping({}), sweep_id="x", attempt=attempt) | {"status": status}
        write_files(folder, record)
        append_record(folder / "records.jsonl", record)
        tracker.log_record(record, files_of(folder, record))
    tracker.finish(status="FINISHED", summary={}, pooled=None)
    runs = of_sweep(uri, folder)
    assert {run.info.run_name: run.info.status for run in children(runs)} == {
        "manual fp32 compile=off · round 1 · timeout": "FAILED",
        "manual fp32 compile=off · round 1 · attempt 2": "FINISHED",
    }
    assert parents(runs)[0].data.metrics == {"rounds_ok": 1.0}
