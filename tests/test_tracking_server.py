"""A sweep and a real MLflow server that goes away and comes back; the UI command; the UI in a browser."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from fake_sweep import make_sweep, summarise
from tracking_help import ROOT, children, command, parents, runs_in, state, sweep_json

from tinydit_ray.tracking import Tracker, TrackingError, files_of, summary_files
from tinydit_ray.tracking.sync import sync
from tinydit_ray.tracking.ui import _links

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.mlflow


LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine's own server, never a proxy


class Server:
    """The project's ``ui`` command on a store of its own; stopped by its process group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.store = f"sqlite:///{folder}/mlflow.db"
        self.output = folder / "server.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tinydit_ray.tracking", "ui", "--port", str(self.port)],
                cwd=self.folder,
                env={name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
                | {"PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                with LOCAL.open(f"{self.uri}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(self.output.read_text())

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=30)
            self.process = None
            self._wait_until_closed()

    def _wait_until_closed(self) -> None:
        """The server's workers are children of the command: until they too are gone, the port answers."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                return
            time.sleep(0.05)
        raise AssertionError(f"port {self.port} still answers")


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
    runs = of_sweep(server, folder)
    (parent,) = parents(runs)
    assert (parent.info.status, bool(parent.info.end_time)) == ("FINISHED", True)
    keys = [run.data.tags["record_key"] for run in children(runs)]
    assert len(keys) == len(set(keys)) == 5
    client = mlflow.MlflowClient(tracking_uri=server.uri)
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


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium")
def test_the_rounds_table_in_a_browser(server, sweep):
    """The printed link opens the table of training runs with the columns of the comparison."""
    folder, records = sweep
    tracker = Tracker.open(uri=server.uri, experiment="speed", sweep=sweep_json(folder), sweep_dir=folder)
    tracker.finish(status="FINISHED", summary={}, pooled=summarise(folder, records))
    link = next(link for _, link in _links(server.store, server.port) if "tinydit-rounds" in link)
    browser = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1700,1000"]
    browser += ["--disable-background-networking", f"--user-data-dir={folder.parent / 'browser'}"]
    browser += ["--virtual-time-budget=20000", "--dump-dom", link]
    page = subprocess.run(browser, capture_output=True, text=True, timeout=90).stdout
    rows = {}
    for part in page.split('row-index="')[1:]:
        if name := re.search(r">((?:manual|sdpa) [^<>]* · round [12][^<>]*)<", part):
            rows[int(part.split('"')[0])] = name[1]
    assert rows[0].startswith("sdpa bf16 compile=off")  # the fastest
    assert len(set(rows.values())) == 5
    columns = re.findall(r'col-id="(?:metrics|tags)\.`(\w+)`"', page)
    assert {"ms_per_step", "speedup_vs_control", "speedup_pooled", "verdict"} <= set(columns)
