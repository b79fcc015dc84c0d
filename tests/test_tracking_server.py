"""A sweep and a real MLflow server that goes away and comes back; the UI command; the UI in a browser."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from fake_sweep import make_sweep, summarise
from tracking_help import Server, children, command, parents, runs_in, state, sweep_json

from tinydit_ray.tracking import Tracker, TrackingError, files_of, summary_files
from tinydit_ray.tracking.sync import sync

pytestmark = pytest.mark.mlflow


@pytest.fixture(scope="module")
def only_server(tmp_path_factory):
    place = Server(tmp_path_factory.mktemp("server"))
    try:
        yield place
    finally:  # also where it never answered
        place.stop()


@pytest.fixture
def server(only_server):
    """One server for all tests; started anew where a test before left it stopped."""
    if only_server.process is None:
        only_server.start()
    return only_server


@pytest.fixture
def sweep(tmp_path):
    folder = tmp_path / "runs" / "über the wire"
    return folder, make_sweep(folder, rounds=1)


def of_sweep(server: Server, folder: Path):
    wanted = sweep_json(folder)["sweep_id"]
    return [run for run in runs_in(server.uri) if run.data.tags["sweep_id"] == wanted]


def test_the_server_goes_away_and_comes_back(server, sweep):
    folder, records = sweep
    secret = server.uri.replace("http://", "http://ann:s3cret@")
    tracker = Tracker.open(uri=secret, experiment="speed", sweep=sweep_json(folder), sweep_dir=folder)
    assert tracker.uri == server.uri.replace("http://", "http://ann:***@")
    tracker.log_record(records[0], files_of(folder, records[0]))
    server.stop()

    start = time.monotonic()
    tracker.log_record(records[1], files_of(folder, records[1]))
    assert time.monotonic() - start < 3
    start = time.monotonic()
    for record in records[2:]:
        tracker.log_record(record, files_of(folder, record))
    tracker.log_record(records[1], {})
    assert time.monotonic() - start < 0.2
    table = summarise(folder, records)
    tracker.finish(status="FINISHED", summary=summary_files(folder), pooled=table)
    assert tracker.unsent == 4
    (warning,) = tracker.warnings
    assert "does not answer (connection refused)" in warning
    assert "tracking sync" in warning
    assert "s3cret" not in warning + "".join(path.read_text() for path in folder.glob("mlflow.log"))

    with pytest.raises(TrackingError, match="cannot be reached"):
        sync(folder, server.uri)
    server.start()
    assert [run.info.status for run in parents(of_sweep(server, folder))] == ["RUNNING"]
    done = command("sync", str(folder), "--tracking-uri", secret, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "4 of 5 records sent, 0 missing; the sweep is FINISHED" in done.stdout
    assert "s3cret" not in done.stdout + done.stderr
    check_complete(server, folder)
    before = state(server.uri)
    assert sync(folder, server.uri).sent == 0
    assert state(server.uri) == before


def check_complete(server, folder):
    from mlflow import MlflowClient

    runs = of_sweep(server, folder)
    (parent,) = parents(runs)
    assert (parent.info.status, bool(parent.info.end_time)) == ("FINISHED", True)
    keys = [run.data.tags["record_key"] for run in children(runs)]
    assert len(keys) == len(set(keys)) == 5
    client = MlflowClient(tracking_uri=server.uri)
    for run in children(runs):
        stored = {item.path for item in client.list_artifacts(run.info.run_id)}
        assert {"log.txt", "steps.npz", "loss.csv", "samples.png", "record.json"} <= stored
    assert (server.folder / "mlartifacts").is_dir()
    assert b"s3cret" not in (server.folder / "mlflow.db").read_bytes()
    assert not any(b"s3cret" in path.read_bytes() for path in server.folder.rglob("sweep.json"))


def test_a_server_back_in_time_gets_all_without_sync(server, sweep):
    folder, records = sweep
    tracker = Tracker.open(uri=server.uri, experiment="speed", sweep=sweep_json(folder), sweep_dir=folder)
    server.stop()
    try:
        tracker.log_record(records[0], files_of(folder, records[0]))
        tracker.log_record(records[1], files_of(folder, records[1]))
    finally:
        server.start()
    tracker._retry_at = 0.0  # the pause is over
    tracker.log_record(records[2], files_of(folder, records[2]))
    assert tracker.unsent == 0
    assert len(children(of_sweep(server, folder))) == 3
    tracker.finish(status="FINISHED", summary={}, pooled=None)
    assert len(children(of_sweep(server, folder))) == 5


def test_a_closed_port_and_a_silent_server_are_refused_within_seconds(sweep):
    folder, _ = sweep
    with socket.socket() as silent:  # takes connections, never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        for place, why in ((1, "connection refused"), (port, "no answer in time")):
            uri = f"http://ann:s3cret@127.0.0.1:{place}"
            start = time.monotonic()
            with pytest.raises(TrackingError, match=rf"cannot be reached \({why}\)") as caught:
                Tracker.open(uri=uri, experiment="speed", sweep=sweep_json(folder), sweep_dir=folder)
            assert time.monotonic() - start < 10
            assert "s3cret" not in str(caught.value)
            assert "\n" not in str(caught.value)


def test_the_ui_is_on_this_machine_only_and_says_where(server):
    output = server.output.read_text()
    assert f"store   {server.store}" in output
    assert f"http://127.0.0.1:{server.port}" in output
    listening = Path("/proc/net/tcp").read_text().splitlines()
    addresses = {
        line.split()[1].split(":")[0] for line in listening if f":{server.port:04X} 00000000" in line
    }
    assert addresses == {"0100007F"}  # 127.0.0.1


def test_a_taken_port_is_one_line(server, tmp_path):
    done = command("ui", "--port", str(server.port), "--tracking-uri", "sqlite:///x.db", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"port {server.port} cannot be used" in done.stderr
    assert done.stderr.count("\n") == 1
