"""A real `ray up ray_cluster.local.yaml` on three hosts made of namespaces: workers join, one is cut off in a sweep."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml
from netns_hosts import ROOT, Host, Hosts, why_not

pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.slow]

RAY = f"{sys.prefix}/bin/ray"
SWEEP = (
    "cd ~/tinydit && python sweeps/speed_grid.py --address auto --set model=32/1/2 --set batch_size=16"
    " --set attention=manual,sdpa --set precision=fp32,bf16 --cpus-per-worker 1 --data shapes --rounds 1 --time 6"
    " --steps 4 --fd-n 0 --no-report --name first"
)
MISSES_HEAD = "RAY_gcs_rpc_server_reconnect_timeout_s=15"  # a minute by default: how long a worker waits for its head
NODES = """
import json, ray
ray.init("auto", log_to_driver=False, logging_level="ERROR")
print(json.dumps({n["NodeManagerAddress"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}))
"""


def filled_in(hosts: list[Host]) -> dict[str, Any]:
    """The file of the product with addresses filled in; what is installed already is not installed again, and each
    worker is as small as this machine needs it."""
    config = yaml.safe_load((ROOT / "ray_cluster.local.yaml").read_text())
    head, *workers = [host.address for host in hosts]
    config["provider"] |= {"head_ip": head, "worker_ips": workers}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": "~/.ssh/key"}
    make, install, profile = config["setup_commands"]
    assert "pip install" in install
    paths = "echo 'export PYTHONPATH=$HOME/tinydit' >> ~/.bashrc"
    config["setup_commands"] = [f"ln -sfn {sys.prefix} ~/tinydit-venv", make, paths, profile]
    small = " --object-store-memory=100000000"
    for key, more in (("head_start_ray_commands", small), ("worker_start_ray_commands", f"{small} --num-cpus=1")):
        config[key] = [f"export {MISSES_HEAD}; {c}{more}" if "ray start" in c else c for c in config[key]]
    return config


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    found = Hosts(3, tmp_path_factory.mktemp("hosts"))
    yield found
    found.close()


def on_head(hosts: Hosts, command: str) -> str:
    return hosts.hosts[0].run(f". ~/.bashrc; {command}").stdout


def alive(hosts: Hosts) -> dict[str, str]:
    """Address -> node id."""
    lines = on_head(hosts, f"python -c {shlex.quote(NODES)}").splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


def until(what: str, check: Any, limit_s: float) -> Any:
    end = time.monotonic() + limit_s
    while not (found := check()):
        assert time.monotonic() < end, f"{what}: not within {limit_s:.0f} s"
        time.sleep(1.0)
    return found


def test_ray_up_a_sweep_a_host_cut_off_and_ray_down(hosts: Hosts) -> None:
    head, *workers = hosts.hosts
    outside = hosts.outside
    text = json.dumps(filled_in(hosts.hosts))  # JSON is YAML
    outside.run(f"echo {shlex.quote(text)} > cluster.yaml; RAY_AUTH_MODE=token {RAY} get-auth-token --generate")
    start = time.monotonic()
    up = outside.run(f"cd {ROOT} && {RAY} up -y --no-config-cache ~/cluster.yaml", timeout=180)
    print(up.stdout, f"\nray up: {time.monotonic() - start:.0f} s")
    assert up.returncode == 0, up.stdout
    try:
        ids = until("every worker joins", lambda: len(found := alive(hosts)) == 3 and found, 90)
        print(f"all nodes after {time.monotonic() - start:.0f} s: {ids}")
        refused = head.run(f"{RAY} status --address {head.address}:6379", RAY_AUTH_MODE="disabled")
        assert refused.returncode != 0  # without the token
        with ThreadPoolExecutor(1) as pool:
            sweep = pool.submit(outside.run, f"{RAY} exec ~/cluster.yaml {shlex.quote(SWEEP)}", timeout=400)
            try:
                until("a cell is timed on each worker", lambda: sweep.done() or all(map(is_timing, workers)), 150)
                assert not sweep.done(), sweep.result().stdout
                workers[0].cable(up=False)
                print(f"{workers[0].address} cut off")
            finally:
                done = sweep.result()
        print(done.stdout)
        check_rows(hosts, ids, done.stdout)
        check_mlflow(hosts)
        check_results_come_home(hosts)
    finally:
        workers[0].cable(up=True)
        down = outside.run(f"cd {ROOT} && {RAY} down -y ~/cluster.yaml", timeout=180)
        print(down.stdout)
    assert down.returncode == 0, down.stdout
    ended = time.monotonic()
    # Ray's local provider stops Ray on the head alone; a worker ends when it has missed the head for a while
    try:
        until("every host is empty", lambda: not leftover(hosts), 150)
    except AssertionError as error:
        raise AssertionError(f"{error}: {leftover(hosts)}") from None
    print(f"every host is empty {time.monotonic() - ended:.0f} s after ray down")


def check_mlflow(hosts: Hosts) -> None:
    """The head's server shows the sweep, to the head alone."""
    read = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=20).read().decode())"
    page = "5000/api/2.0/mlflow/experiments/get-by-name?experiment_name=tinydit"
    head, ask = hosts.hosts[0], f"{sys.executable} -c {shlex.quote(read)}"
    assert '"experiment_id"' in (shown := head.run(f"{ask} http://127.0.0.1:{page}").stdout), shown
    assert "Connection refused" in hosts.outside.run(f"{ask} http://{head.address}:{page}").stdout


def check_results_come_home(hosts: Hosts) -> None:
    command = f"mkdir -p runs/first; cd {ROOT} && {RAY} rsync-down ~/cluster.yaml '~/tinydit/runs/first/' ~/runs/first/"
    done = hosts.outside.run(command)
    assert done.returncode == 0, done.stdout
    there = on_head(hosts, "cat ~/tinydit/runs/first/records.jsonl")
    assert hosts.outside.run("cat runs/first/records.jsonl").stdout == there != ""


def leftover(hosts: Hosts) -> list[str]:
    return [line[:200] for host in hosts.hosts for line in host.processes()]


def is_timing(host: Host) -> bool:
    return host.run("cat ~/tinydit/runs/first/cells/*/*/phase").stdout == "timing"


def check_rows(hosts: Hosts, ids: dict[str, str], output: str) -> None:
    """The cell of the cut-off host was run again on the other one; the table is whole."""
    cut, stays = (ids[host.address] for host in hosts.hosts[1:])
    rows = [json.loads(line) for line in on_head(hosts, "cat ~/tinydit/runs/first/records.jsonl").splitlines()]
    lost = [row for row in rows if row["status"] != "ok"]
    assert [(row["node_id"], row["attempt"], row["flags"]) for row in lost] == [(cut, 1, "node-lost")], output
    ok = {row["cell_id"]: row for row in rows if row["status"] == "ok"}
    assert len(ok) == 4, output
    assert ok[lost[0]["cell_id"]]["attempt"] == 2
    assert {row["node_id"] for row in ok.values()} == {stays}
    assert {row["node_ip"] for row in ok.values()} == {hosts.hosts[2].address}
    assert all(row["concurrent_trials"] == 1 for row in rows)  # each host is a machine of its own
    assert "sweep folder:" in output
