"""``--dry-run --cluster FILE``: hours and dollars from the file's instance types, checked by hand-made sums."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sweep_help import ROOT

from tinydit_ray.sweep import prices
from tinydit_ray.sweep.cli import run, speed_grid
from tinydit_ray.sweep.cost import HEAD_START_S, START_S, estimate, read_cluster
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.options import SweepOptions, options_from
from tinydit_ray.sweep.parser import parser
from tinydit_ray.sweep.plan import Round, make_cells, make_rounds, round_estimate_s

AWS = ROOT / "ray_cluster.yaml"
GRID = ["--set", "attention=manual,sdpa", "--set", "seed=0,1,2,3,4", "--rounds", "2", "--cpus-per-worker", "8"]


def plan_of(*arguments: str, device: str = "cpu") -> tuple[SweepOptions, list[Round]]:
    args = parser("speed_grid.py", "").parse_args([*GRID, "--dry-run", *arguments])
    options = options_from(args, default_grid="published", command=[])
    cells, _ = make_cells(options, device=device, cpus=8, node_kind="k", data_digest="d")
    return options, make_rounds(cells, options.rounds, "")


def test_the_sum_is_that_of_its_parts() -> None:
    """20 trials on 4 spot nodes; nodes from their start until they are returned, the head from first to last."""
    options, rounds = plan_of()
    found = estimate(read_cluster(AWS), rounds, options)
    busy = sum(round_estimate_s(item, options) for item in rounds)
    assert (found.node.instance, found.node.spot, found.nodes) == ("c7i.2xlarge", True, 4)
    assert found.busy_s == pytest.approx(busy)
    assert found.hours == pytest.approx((HEAD_START_S + START_S + busy / 4) / 3600)
    node_hours = 4 * (START_S + busy / 4 + 600) / 3600
    hourly = 0.357 * prices.SPOT_SHARE + 140 * 0.08 / 730
    assert found.workers_usd == pytest.approx(node_hours * hourly)
    head_hours = (HEAD_START_S + START_S + busy / 4 + 600) / 3600
    assert found.head_usd == pytest.approx(head_hours * (0.1008 + 140 * 0.08 / 730))


def test_a_grid_for_gpus_takes_the_gpu_nodes() -> None:
    options, rounds = plan_of(device="cuda")
    found = estimate(read_cluster(AWS), rounds, options)
    assert (found.node.instance, found.node.spot, found.nodes) == ("g6.2xlarge", False, 1)


def test_fewer_trials_than_nodes_take_fewer_nodes() -> None:
    options, rounds = plan_of()
    found = estimate(read_cluster(AWS), rounds[:3], options)
    assert found.nodes == 3
    slowest = max(round_estimate_s(item, options) for item in rounds[:3])
    assert found.hours >= (HEAD_START_S + START_S + slowest) / 3600


def test_a_trial_of_several_workers_fills_several_nodes() -> None:
    options, rounds = plan_of("--set", "workers=2")
    found = estimate(read_cluster(AWS), rounds, options)
    assert found.busy_s == pytest.approx(2 * sum(round_estimate_s(item, options) for item in rounds))
    options, rounds = plan_of("--set", "workers=8")
    with pytest.raises(UsageError, match="8 × 8 CPUs"):
        estimate(read_cluster(AWS), rounds, options)


@pytest.mark.parametrize("name", ["ray_cluster.yaml", "ray_cluster.gcp.yaml", "ray_cluster.local.yaml"])
def test_every_cluster_file_of_ours_has_an_estimate(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*GRID, "--data", "shapes", "--device", "cpu", "--dry-run", "--cluster", str(ROOT / name)]
    assert run(speed_grid, arguments) == 0
    printed = capsys.readouterr().out
    assert f"on {name}: 10 cells in 20 trials on" in printed
    assert ("$" in printed) == ("local" not in name)
    assert "one trial at a time on a node" in printed
    if "local" not in name:
        assert prices.DATE in printed
        assert re.search(r"about \$\d+\.\d\d: workers \$", printed)


def test_another_region_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(AWS.read_text().replace("region: us-west-2", "region: eu-central-1"))
    run(speed_grid, [*GRID, "--data", "shapes", "--device", "cpu", "--dry-run", "--cluster", str(other)])
    assert "the file's region is eu-central-1, whose prices differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("c7i.2xlarge", "x9z.mega"), "no price is known of x9z.mega"),
        (("type: aws", "type: azure"), "prices are known of aws, gcp"),
        (("head_node_type: head\n", ""), "not a cluster file of Ray's (no 'head_node_type')"),
        (('resources: {"CPU": 8}', 'resources: {"CPU": 4}'), "no worker type has what a trial asks for (1 × 8 CPUs"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "wrong.yaml"
    assert change[0] in AWS.read_text()
    path.write_text(AWS.read_text().replace(*change))
    options, rounds = plan_of()
    with pytest.raises(UsageError, match=re.escape(words)):
        estimate(read_cluster(path), rounds, options)


def test_only_with_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(speed_grid, [*GRID, "--data", "shapes", "--cluster", str(AWS)]) == 2
    assert "only with --dry-run" in capsys.readouterr().err
    assert run(speed_grid, [*GRID, "--data", "shapes", "--dry-run", "--cluster", "nowhere.yaml"]) == 2
    assert "cannot be read" in capsys.readouterr().err
