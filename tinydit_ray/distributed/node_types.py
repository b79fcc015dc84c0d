"""The types of node that a cluster can add, as the cluster file of its head says.

Ray tells a driver only which nodes there are: its interface for the configured ones is filled by some managed
services alone. The head's monitor reads them from a file, and so does a task on the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import yaml

from tinydit_ray.config import CellConfig
from tinydit_ray.distributed.on_node import NO_ANSWER, ask_node
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.placement import Node

KIND_LABEL = "tinydit_kind"  # ray start --labels=tinydit_kind=NAME: a kind by name, whatever the machine is
HEAD = "node:__internal_head__"  # a resource of the head alone
OPTION = "--autoscaling-config="  # of the head's monitor
ANSWER_S = 60.0


@dataclass(frozen=True)
class NodeType:
    """A type of node in the cluster file, and how many there may be. ``label`` is the kind that it is named, "" where
    that is only found out on the node."""

    name: str
    cpus: int
    gpus: int
    most: int
    label: str = ""

    def __str__(self) -> str:
        gpus = f" {self.gpus} GPU" if self.gpus else ""
        return f"{self.name} ({self.cpus} CPU{gpus}, up to {self.most})"

    def takes(self, cell: CellConfig, kind: str | None) -> bool:
        """Whether a node of this type could run workers of the cell."""
        fits = Node("", "", "", self.cpus, self.gpus).room(cell) > 0
        return fits and (not self.label or kind in (None, self.label))


def types_of_cluster() -> list[NodeType]:
    """Those with CPUs for trials; none where there is no autoscaler, or it does not know what its nodes have (the
    machines of a local cluster file). Raises UsageError where the head does not answer."""
    heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"]]
    if not heads:
        return []
    address = ray.get_runtime_context().gcs_address
    try:
        return types_in(ask_node(heads[0], config_of_monitor, address, timeout_s=ANSWER_S))
    except NO_ANSWER as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"--address: the head does not say what nodes it can add ({lines[-1]})") from None


def types_in(config: dict[str, Any]) -> list[NodeType]:
    """The types in a cluster file as ``ray up`` left it on the head."""
    at_most = int(config.get("max_workers", 0))
    found = []
    for name, group in config.get("available_node_types", {}).items():
        cpus, gpus = (int(group.get("resources", {}).get(key, 0)) for key in ("CPU", "GPU"))
        most = min(at_most, int(group.get("max_workers", at_most)))
        if cpus and most and name != config.get("head_node_type"):
            found.append(NodeType(name, cpus, gpus, most, str(group.get("labels", {}).get(KIND_LABEL, ""))))
    return found


def config_of_monitor(address: str) -> dict[str, Any]:
    """On the head: what its monitor reads; {} where it has no file. ``address`` tells Rays on one machine apart."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it ended, or is another user's
        files = [Path(a.removeprefix(OPTION)).expanduser() for a in arguments if a.startswith(OPTION)]
        if files and f"--gcs-address={address}" in arguments:
            return dict(yaml.safe_load(files[0].read_text(encoding="utf-8")))
    return {}
