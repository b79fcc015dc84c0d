"""A cluster that can grow: a sweep waits for its nodes where some type has what it asks for, and is refused elsewhere.

Ray's own autoscaler runs with its provider for one machine, in namespaces, so that it all ends with them.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator

import pytest
from netns_hosts import ROOT, Host, Hosts, why_not

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.slow]

HEAD_ID = "f" * 51 + "00000"  # what Ray's provider calls its head
LISTS = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
         "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude",
         "rsync_filter")  # fmt: skip
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
BOTH = "cpu_worker (1 CPU, up to 2), nameless (1 CPU, up to 1)"
STORE = 80_000_000
CONFIG = {
    "cluster_name": "grows", "max_workers": 2, "upscaling_speed": 1.0, "idle_timeout_minutes": 5,
    "provider": {"type": "external", "module": PROVIDER, "head_node_id": HEAD_ID, "launch_multiple": True},
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "cpu_worker": {
            "resources": {"CPU": 1, "object_store_memory": STORE}, "labels": {"tinydit_kind": "small"},
            "node_config": {}, "min_workers": 0, "max_workers": 2,
        },
        "nameless": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 1},
    },
    "head_node_type": "ray.head.default", "auth": {}, "docker": {}, "file_mounts": {},
    "file_mounts_sync_continuously": False, **{name: [] for name in LISTS},
}  # fmt: skip
START = {
    "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID, "RAY_worker_niceness": "0",
}  # fmt: skip
SWEEP = (
    f"{sys.executable} {ROOT}/sweeps/speed_grid.py --address auto --set model=32/1/2 --set batch_size=16"
    " --set attention=manual,sdpa --data shapes --time 0.6 --steps 0 --rounds 1 --no-report"
)


@pytest.fixture(scope="module")
def grows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(0, tmp_path_factory.mktemp("hosts"))
    try:
        ray = f"{sys.prefix}/bin/ray start --head --num-cpus=0 --object-store-memory={STORE} --include-dashboard=false"
        write = f"echo {shlex.quote(json.dumps(CONFIG))} > grows.yaml"
        done = hosts.outside.run(f"{write}; {ray} --autoscaling-config=$HOME/grows.yaml", **START)
        assert done.returncode == 0, done.stdout
        yield hosts.outside
    finally:
        hosts.close()


def test_it_waits_for_a_node_that_can_come(grows: Host) -> None:
    done = grows.run(f"{SWEEP} --cpus-per-worker 1 --on small --name wait", timeout=240)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    words = "waiting for 1 CPU of kind small: no node has that yet; the cluster can add cpu_worker (1 CPU, up to 2)"
    assert f"nodes: {words}" in done.stdout
    assert "nodes: there after" in done.stdout
    rows = [json.loads(line) for line in grows.run("cat runs/wait/records.jsonl").stdout.splitlines()]
    assert [(row["status"], row["node_kind"]) for row in rows] == [("ok", "small")] * 2


def test_what_no_type_of_node_has_is_refused_at_once(grows: Host) -> None:
    done = grows.run(f"{SWEEP} --cpus-per-worker 8")
    assert done.returncode == 2, done.stdout
    assert f"a trial asks for 8 CPU; no type of node has that: {BOTH}" in done.stdout


def test_it_waits_no_longer_than_its_limit(grows: Host) -> None:
    done = grows.run(f"{SWEEP} --cpus-per-worker 1 --on never --wait-nodes 4s")
    assert done.returncode == 2, done.stdout
    assert "waited 4 s for 1 CPU of kind never: no such node came" in done.stdout
