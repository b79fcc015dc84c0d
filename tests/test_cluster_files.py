"""The cluster files: what Ray itself says of them, and what we promise about limits, versions, ports and the token."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinydit_ray.distributed.resources import DRIVER_RESOURCE

ROOT = Path(__file__).resolve().parents[1]
CLOUD = ["ray_cluster.yaml", "ray_cluster.gcp.yaml"]
FILES = [*CLOUD, "ray_cluster.local.yaml"]
PINS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line and line[0] != "#"
)
EVERYWHERE = re.compile(r"0\.0\.0\.0|::/0|--dashboard-host=(?!127\.0\.0\.1)|--host(?![ =]127\.0\.0\.1)\b")


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text())


def starts(config: dict[str, Any]) -> dict[str, str]:
    """The ``ray start`` command of the head and of a worker."""
    keys = {"head": "head_start_ray_commands", "worker": "worker_start_ray_commands"}
    return {who: next(c for c in config[key] if "ray start" in c) for who, key in keys.items()}


@pytest.mark.ray
@pytest.mark.parametrize("name", FILES)
def test_ray_itself_accepts_it(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(read(name))
    validate_config(prepared)
    if name == "ray_cluster.local.yaml":  # every listed worker is wanted, at once
        (only,) = prepared["available_node_types"].values()
        assert only["min_workers"] == only["max_workers"] == len(read(name)["provider"]["worker_ips"])


@pytest.mark.ray
def test_ray_refuses_one_with_a_mistake() -> None:
    """So that passing above means something."""
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    wrong = read("ray_cluster.yaml")
    wrong["available_node_types"]["cpu_worker"]["max_worker"] = 4
    with pytest.raises(ValidationError):
        validate_config(prepare_config(wrong))


@pytest.mark.parametrize("name", CLOUD)
def test_limits_of_what_can_be_billed(name: str) -> None:
    config = read(name)
    types = config["available_node_types"]
    for node in types.values():
        assert 0 <= node["min_workers"] <= node["max_workers"]
    workers = [node for key, node in types.items() if key != config["head_node_type"]]
    assert sum(node["max_workers"] for node in workers) <= config["max_workers"]
    assert all(node["min_workers"] == 0 for node in workers)  # nothing runs that nobody asked for
    assert 0 < config["idle_timeout_minutes"] <= 15
    assert {"GPU" in node["resources"] for node in workers} == {True, False}
    assert all("tinydit_kind" in node["labels"] for node in workers)


@pytest.mark.parametrize("name", FILES)
def test_the_head_trains_nothing_but_drives(name: str) -> None:
    config = read(name)
    if name in CLOUD:
        head = config["available_node_types"][config["head_node_type"]]
        assert head["resources"]["CPU"] == 0
        assert head["resources"][DRIVER_RESOURCE] > 0
        assert head["max_workers"] == 0
    else:
        assert "--num-cpus=0" in starts(config)["head"]
        assert f'"{DRIVER_RESOURCE}":1000' in starts(config)["head"]


@pytest.mark.parametrize("name", FILES)
def test_versions_are_those_of_the_constraints_file(name: str) -> None:
    text = (ROOT / name).read_text()
    images = re.findall(r"rayproject/ray:([\w.-]+)", text)
    assert (len(images) >= 2) == (name in CLOUD)
    for tag in images:
        assert re.fullmatch(rf"{re.escape(PINS['ray'])}-py311-(cpu|gpu)", tag)
    assert not re.findall(r"[\w-]+(?:==|>=|~=)[\d.]+", text)  # no second place for a version
    for command in re.findall(r".*pip install.*", text):
        assert "constraints.txt" in command


@pytest.mark.parametrize("name", FILES)
def test_token_niceness_and_cleaning_up_are_on_in_every_start_command(name: str) -> None:
    config = read(name)
    for command in starts(config).values():
        before = command[: command.index("ray start")]
        assert "RAY_AUTH_MODE=token" in before
        assert "RAY_worker_niceness=0" in before
        assert "RAY_process_group_cleanup_enabled=1" in before
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "RAY_AUTH_MODE=token" in str(config["setup_commands"])  # for `ray exec`, whose shell is another


@pytest.mark.parametrize("name", FILES)
def test_no_port_is_open_to_the_world(name: str) -> None:
    config = read(name)
    assert not EVERYWHERE.search(strip_comments(ROOT / name))
    assert "--dashboard-host=127.0.0.1" in starts(config)["head"]
    assert "tinydit_ray.tracking ui" in str(config["head_start_ray_commands"])  # always on 127.0.0.1
    if name in CLOUD:
        for node in config["available_node_types"].values():
            network = node["node_config"].get("SecurityGroupIds") or node["node_config"].get("networkInterfaces")
            assert network  # Ray would make one that lets the whole world reach the SSH port


def strip_comments(path: Path) -> str:
    return "\n".join(line.split(" #")[0] for line in path.read_text().splitlines() if not line.startswith("#"))


def test_the_port_check_sees_an_open_port() -> None:
    for line in ("--dashboard-host=0.0.0.0", "CidrIp: 0.0.0.0/0", "mlflow server --host 0.0.0.0", "CidrIpv6: ::/0"):
        assert EVERYWHERE.search(line)
    for line in ("--dashboard-host=127.0.0.1", "mlflow server --host 127.0.0.1"):
        assert not EVERYWHERE.search(line)


@pytest.mark.ray
def test_the_local_file_starts_the_old_autoscaler_whatever_ray_up_exports() -> None:
    """`ray up` exports RAY_enable_autoscaler_v2=1 before the command; the assignment in the command wins."""
    from ray.autoscaler._private.util import with_envs

    (command,) = with_envs([starts(read("ray_cluster.local.yaml"))["head"]], {"RAY_enable_autoscaler_v2": "1"})
    assert command.rindex("RAY_enable_autoscaler_v2=0") > command.rindex("RAY_enable_autoscaler_v2=1")
    assert command.index("RAY_enable_autoscaler_v2=0") < command.index("ray start")


@pytest.mark.ray
def test_the_local_provider_refuses_node_types() -> None:
    """Why the local file has none."""
    import click
    from ray.autoscaler._private.util import prepare_config

    config = copy.deepcopy(read("ray_cluster.local.yaml"))
    config["available_node_types"] = read("ray_cluster.yaml")["available_node_types"]
    with pytest.raises(click.ClickException):
        prepare_config(config)


@pytest.mark.parametrize("name", FILES)
def test_mlflow_serves_the_store_that_sweeps_write_to(name: str) -> None:
    """By default that is mlflow.db in the folder where the walk runs them."""
    (server,) = [c for c in read(name)["head_start_ray_commands"] if "tracking ui" in c]
    assert server.startswith("cd ~/tinydit && ")
    assert "--tracking-uri sqlite:///mlflow.db " in server
    assert "'cd ~/tinydit && python sweeps/" in (ROOT / "docs" / "clusters.md").read_text()


@pytest.mark.skipif(not shutil.which("rsync"), reason="needs rsync, as ray up does")
@pytest.mark.parametrize("name", FILES)
def test_every_file_of_the_product_is_carried_and_no_results(name: str, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    found = [path for folder in ("tinydit_ray", "sweeps", "analysis") for path in (ROOT / folder).rglob("*.*")]
    wanted = [path.relative_to(ROOT) for path in found if path.is_file() and "__pycache__" not in path.parts]
    unwanted = map(Path, ("runs/first/records.jsonl", "data/cifar10/part.parquet", ".git/HEAD", "mlflow.db"))
    for path in (*wanted, *unwanted):
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).touch()
    excluded = [word for pattern in read(name)["rsync_exclude"] for word in ("--exclude", pattern)]
    subprocess.run(["rsync", "-a", *excluded, f"{checkout}/", tmp_path / "node"], check=True)
    there = {path.relative_to(tmp_path / "node") for path in (tmp_path / "node").rglob("*") if path.is_file()}
    assert there == set(wanted)
