"""Sweeps over several nodes of one cluster, processes of this machine: kinds, pinning, nodes that come and go."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sweep_help import ROOT, TINY, records, results, sweep

from tinydit_ray.config import from_mapping
from tinydit_ray.grid import GridError, parse_grid
from tinydit_ray.sweep.placement import Node, Placement
from tinydit_ray.sweep.results import rows_of_kinds

CELL = from_mapping({"cpus_per_worker": 1})
STORE = 80_000_000  # bytes; Ray's least is 75 MB
ONE_ROUND = [*TINY, "--cpus-per-worker", "1", "--rounds", "1"]


def place(nodes: list[Node], concurrent: int | str | None, count: int, **config: Any) -> list[tuple[str, ...]]:
    """The nodes of as many trials as fit at once, ``count`` at most."""
    placement, cell = Placement(nodes, concurrent), from_mapping({"cpus_per_worker": 1, **config})
    found = []
    for number in range(count):
        if placement.has_room(cell, "k"):
            found.append(placement.take(str(number), cell, "k").nodes)
    return found


def test_one_trial_per_node_unless_asked_otherwise() -> None:
    nodes = [Node("a", "1", "k", 4), Node("b", "2", "k", 2), Node("c", "3", "other", 8)]
    assert place(nodes, None, 9) == [("a",), ("b",)]
    assert place(nodes, 3, 9) == [("a",), ("b",), ("a",)]
    assert place(nodes, None, 9, workers=4, batch_size=128) == [("a",)]
    assert place(nodes, None, 9, workers=6, batch_size=96) == [("a", "b")]
    assert place(nodes, None, 9, workers=8, batch_size=128) == []
    gpus = [Node("a", "1", "k", 8, 2), Node("b", "2", "k", 1, 4)]
    assert place(gpus, None, 9, gpus_per_worker=1) == [("a",), ("b",)]
    assert sorted(place(gpus, "per-gpu", 9, gpus_per_worker=1)) == [("a",), ("a",), ("b",)]


def test_a_trial_knows_how_many_run_on_its_machine() -> None:
    """Nodes of one address are one machine; of others, not."""
    apart = Placement([Node("a", "1", "k", 1), Node("b", "2", "k", 1)])
    assert apart.take("x", CELL, "k").together == 1
    one = Placement([Node("a", "1", "k", 1), Node("b", "1", "other", 1), Node("c", "1", "k", 0)])
    assert one.take("x", CELL, "k").together == 2
    one.release("x")
    assert one.has_room(CELL, "k")
    assert Placement([Node("", "1", "k", 8)], 4).take("x", CELL, "k").together == 4


def test_a_placement_that_is_none_is_refused() -> None:
    with pytest.raises(GridError, match="placement: 'everywhere' is not possible; possible: one-kind, every-node-kind"):
        parse_grid("axes: {attention: [manual]}\nplacement: everywhere\n")


def test_rows_of_two_kinds_are_pooled_apart() -> None:
    """The spread between processes of one kind says nothing of the other's."""
    from fake_sweep import record_of

    rows = []
    for kind, values in (("steady", (2.0, 2.0, 2.0)), ("restless", (1.0, 2.0, 4.0))):
        for number, value in enumerate(values, start=1):
            row = record_of(CELL, sweep_id="s", round_=number)
            row |= {"node_kind": kind, "cell_id": kind, "speedup_vs_control": value}
            rows.append(row | {"speedup_ci_low": 0.99 * value, "speedup_ci_high": 1.01 * value})
    both = {row["cell_id"]: row for row in rows_of_kinds(rows)}
    alone = {row["cell_id"]: row for row in rows_of_kinds(rows[:3])}
    assert both["steady"]["speedup_pooled_ci_low"] == alone["steady"]["speedup_pooled_ci_low"]
    assert both["restless"]["speedup_pooled_ci_low"] < 1.5


class Nodes:
    """A cluster whose head runs no trial, two nodes of the kind ``small`` and one ``big``."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.small = [self.add("small"), self.add("small")]
        self.add("big")

    def add(self, kind: str) -> Any:
        return self.cluster.add_node(
            num_cpus=2 if kind == "big" else 1, labels={"tinydit_kind": kind}, object_store_memory=STORE
        )


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        found = Nodes()
        yield found
        found.cluster.shutdown()


@pytest.mark.ray
@pytest.mark.slow
def test_each_cell_on_every_kind_of_node(nodes: Nodes, tmp_path: Path) -> None:
    grid = tmp_path / "two.yaml"
    grid.write_text("axes: {attention: [manual, sdpa]}\nplacement: every-node-kind\n")
    options = [*ONE_ROUND, "--grid", "two.yaml", "--address", nodes.cluster.address, "--name", "all"]
    done = sweep("speed_grid.py", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = records(tmp_path / "runs" / "all")
    assert sorted((row["node_kind"], row["config.attention"], row["status"]) for row in rows) == [
        (kind, attention, "ok") for kind in ("big", "small") for attention in ("manual", "sdpa")
    ]
    small = {node.node_id for node in nodes.small}
    assert {row["node_id"] for row in rows if row["node_kind"] == "small"} == small  # both at once
    assert not small & {row["node_id"] for row in rows if row["node_kind"] == "big"}
    assert all(row["node_ip"] for row in rows)
    assert all("concurrent" in row["flags"] for row in rows)  # these nodes are one machine
    assert len({row["cell_id"] for row in rows}) == 4
    assert len({row["config_id"] for row in rows}) == 2
    for text in (done.stdout, (tmp_path / "runs" / "all" / "summary.txt").read_text()):
        _, *parts = re.split(r"^on (\w+) *$", text.split("noise floor:")[0], flags=re.MULTILINE)
        tables = dict(zip(parts[::2], parts[1::2], strict=True))
        assert tables.keys() == {"big", "small"}
        for kind, table in tables.items():  # a table each, and no cell of another kind in it
            assert set(re.findall(r"@(\w+)", table)) == {kind}


@pytest.mark.ray
@pytest.mark.slow
def test_pinned_to_a_kind_while_nodes_come_and_go(nodes: Nodes, tmp_path: Path) -> None:
    """One of two nodes is killed with its cell on it, another joins: every cell has its row."""
    options = [*ONE_ROUND, "--set", "attention=manual,sdpa", "--set", "precision=fp32,bf16", "--on", "small"]
    options += ["--time", "6", "--address", nodes.cluster.address, "--name", "pinned"]
    folder, environment = tmp_path / "runs" / "pinned", {**os.environ, "COLUMNS": "200"}
    running = subprocess.Popen(
        [sys.executable, str(ROOT / "sweeps" / "speed_grid.py"), *options],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip
    try:
        end = time.monotonic() + 150
        while sum(p.read_text() == "timing" for p in folder.glob("cells/*/*/phase")) < 2:
            assert time.monotonic() < end, "two cells never ran at once"
            assert running.poll() is None, running.communicate()[0]
            time.sleep(0.3)
        gone, left = nodes.small
        added = nodes.add("small")
        nodes.cluster.remove_node(gone, allow_graceful=False)
        output = running.communicate(timeout=240)[0]
    finally:
        running.kill()
    assert running.returncode == 0, output
    rows = records(folder)
    lost = [row for row in rows if row["status"] != "ok"]
    assert [(row["node_id"], row["attempt"], row["flags"]) for row in lost] == [(gone.node_id, 1, "node-lost")], output
    assert "was lost while the trial ran there; run again" in output
    again = [row for row in rows if (row["cell_id"], row["attempt"]) == (lost[0]["cell_id"], 2)]
    assert [row["status"] for row in again] == ["ok"]
    assert {row["node_id"] for row in rows if row["status"] == "ok"} == {left.node_id, added.node_id}
    assert {row["node_kind"] for row in rows} == {"small"}
    table = results(folder)
    assert len(table) == 4
    assert set(table["status"]) == {"ok"}


@pytest.mark.ray
def test_what_no_node_can_give_is_one_line(nodes: Nodes, tmp_path: Path) -> None:
    for extra, words in (
        (["--on", "huge"], "--on huge: no node is of this kind; there is"),
        (["--on", "small", "--cpus-per-worker", "2"], "asks for 1 × 2 CPU; the nodes of kind small have 1 CPU"),
    ):
        done = sweep("speed_grid.py", *ONE_ROUND, *extra, "--address", nodes.cluster.address, cwd=tmp_path)
        assert done.returncode == 2, done.stdout + done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert words in done.stderr
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
