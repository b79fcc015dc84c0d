"""A worker of a data-parallel trial is killed (SIGKILL): its round has failed with that reason, the sweep goes on, and
the cluster has everything back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweep_help import ROOT, records, sweep

from tinydit_ray.distributed.resources import DRIVER_RESOURCE

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GRID = [
    "--set", "model=32/1/2", "--set", "batch_size=16", "--set", "attention=manual,sdpa", "--data", "shapes",
    "--time", "5", "--rounds", "1", "--steps", "0", "--workers", "2", "--cpus-per-worker", "1", "--device", "cpu",
    "--no-report",
]  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray that outlives the sweep: its address."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    resources = {DRIVER_RESOURCE: 10}
    head = {"num_cpus": 2, "resources": resources, "object_store_memory": 10**8, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield found.address
    finally:
        ray.shutdown()
        found.shutdown()


def ranks_of(folder: Path) -> dict[int, Path]:
    """Processes that write to the log of a round in this folder: pid -> log."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            target = Path(os.readlink(entry))
        except OSError:
            continue
        if target.is_relative_to(folder / "cells"):
            found[int(entry.parts[2])] = target
    return found


def kill_second_worker(folder: Path, driver: subprocess.Popen[str], when: str = "timing", having: str = "") -> str:
    """Kill rank 1 of the first trial in this phase, once rank 0 has written a file of this name; the name of its
    cell's folder."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and driver.poll() is None:
        for phase in folder.glob("cells/*/r1-a1/rank1/phase"):
            if phase.read_text() == when and (phase.parents[1] / having).exists():
                (victim,) = [pid for pid, log in ranks_of(folder).items() if log.parent == phase.parent]
                os.kill(victim, signal.SIGKILL)
                return phase.parents[2].name
        time.sleep(0.01)
    raise AssertionError(f"no second worker was seen in its {when}: {driver.communicate()}")


def test_a_killed_worker_fails_its_round_and_leaves_nothing(tmp_path: Path, cluster: str) -> None:
    folder = tmp_path / "runs" / "killed"
    command = [sys.executable, str(ROOT / "sweeps" / "speed_grid.py"), *GRID, "--address", cluster, "--name", "killed"]
    driver = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}
    )
    try:
        victim = kill_second_worker(folder, driver)
        printed, _ = driver.communicate(timeout=300)
    finally:
        driver.kill()
    assert driver.returncode == 3, printed
    rows = {row["cell_id"]: row for row in records(folder)}
    failed = rows.pop(victim.rpartition("-")[2])
    assert failed["status"] == "failed"
    assert "worker 1 of 2 ended" in failed["reason"]
    assert failed["reason"] in printed.replace("\n", " ") or "worker 1 of 2 ended" in printed
    (other,) = rows.values()
    assert (other["status"], other["effective.workers"]) == ("ok", 2)
    check_nothing_is_held(folder, cluster)
    again = sweep("speed_grid.py", *GRID, "--no-ray", "--resume", "killed", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [(row["attempt"], row["status"]) for row in records(folder)[2:]] == [(2, "ok")]


def test_a_trial_with_restarts_left_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """In a Ray of its own: on a cluster it is waited for a minute, in case that the worker's node is gone."""
    folder, steps = tmp_path / "runs" / "restarted", 4000
    more = ["--only", "*sdpa*", "--time", "1", "--steps", str(steps), "--fd-n", "0", "--max-failures", "1"]
    script = [sys.executable, str(ROOT / "sweeps" / "speed_grid.py")]
    driver = subprocess.Popen(
        [*script, *GRID, *more, "--name", "restarted"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ},
    )  # fmt: skip
    try:
        kill_second_worker(folder, driver, "training", "checkpoint/checkpoint.pt")
        printed, _ = driver.communicate(timeout=300)
    finally:
        driver.kill()
    assert driver.returncode == 0, printed
    (row,) = records(folder)
    assert (row["status"], row["attempt"], row["steps_trained"]) == ("ok", 1, steps)
    assert "restarted" in row["flags"].split(",")
    (place,) = folder.glob("cells/*/r1-a1")
    logged = re.search(r"training goes on at step (\d+)", (place / "log.txt").read_text())
    assert logged
    assert 0 < int(logged[1]) < steps
    lines = [line.split(",") for line in (place / "loss.csv").read_text().splitlines()[1:]]
    assert [int(step) for step, _, _ in lines] == list(range(10, steps + 1, 10))  # each once
    assert not (place / "checkpoint").exists()
    assert not ranks_of(folder)


def check_nothing_is_held(folder: Path, address: str) -> None:
    """No process of a round, no placement group, all CPUs and driver places free again."""
    import ray

    ray.init(address=address, log_to_driver=False)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        states = {group["state"] for group in ray.util.placement_group_table().values()}
        free = {name: ray.available_resources().get(name) for name in ("CPU", DRIVER_RESOURCE)}
        if states == {"REMOVED"} and free == {"CPU": 2, DRIVER_RESOURCE: 10} and not ranks_of(folder):
            return
        time.sleep(0.5)
    raise AssertionError(f"left behind: placement groups {states}, free {free}, processes {ranks_of(folder)}")
