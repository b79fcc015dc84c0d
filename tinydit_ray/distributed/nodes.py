"""The nodes of a Ray cluster, each with its kind, as the driver sees them and as a trial finds its own."""

from __future__ import annotations

import time
from typing import Any

import ray

from tinydit_ray.bench.machine import node_kind
from tinydit_ray.distributed.node_types import KIND_LABEL
from tinydit_ray.distributed.on_node import NO_ANSWER, ask_node
from tinydit_ray.sweep.placement import Node

NODE_LABEL = "ray.io/node-id"
PROBE_S = 120.0  # a new node answers as soon as it has started a worker
REFRESH_S = 1.0
MISSED_S = 60.0  # a node that was cut off is missed after this long at most (Ray: five health checks)


class ClusterNodes:
    """A view of the nodes that are alive and have CPUs for trials. The kind of each is asked once."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._kinds: dict[str, str] = {}
        self._labels: set[str] = set()
        self._seen, self._at = [], 0.0  # type: list[Node], float

    def alive(self, *, fresh: bool = False) -> list[Node]:
        """At most a second old, unless ``fresh``. A node that does not answer for long is left out."""
        if fresh or time.monotonic() - self._at > REFRESH_S:
            self._seen = [node for raw in ray.nodes() if raw["Alive"] and (node := self._node(raw))]
            self._at = time.monotonic()
        return self._seen

    def is_label(self, kind: str) -> bool:
        """Whether the kind is a name that its nodes were given, which new ones can be asked for by."""
        return kind in self._labels

    def _node(self, raw: dict[str, Any]) -> Node | None:
        resources = raw["Resources"]
        cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        if cpus < 1 or (self.device == "cuda" and gpus < 1):
            return None
        key = raw["NodeID"]
        if key not in self._kinds:
            label = raw["Labels"].get(KIND_LABEL)
            self._labels |= {label} if label else set()
            kind = label or _ask(key, self.device)
            if kind is None:
                return None
            self._kinds[key] = kind
        return Node(key, raw["NodeManagerAddress"], self._kinds[key], cpus, gpus)


def _ask(node_id: str, device: str) -> str | None:
    """The kind of a node in the words of a process there; None where it does not answer."""
    try:
        return str(ask_node(node_id, _kind_here, device, timeout_s=PROBE_S))
    except NO_ANSWER:
        return None


def _kind_here(device: str) -> str:
    """Processor, or GPU, and how many of them Ray may hand out on this node; its label's name where it has one."""
    own = ray.get_runtime_context().get_node_id()
    raw = next(node for node in ray.nodes() if node["NodeID"] == own)
    if label := raw["Labels"].get(KIND_LABEL):
        return str(label)
    kind, resource = node_kind(device), "GPU" if device == "cuda" else "CPU"
    return f"{kind.rpartition('-x')[0]}-x{int(raw['Resources'].get(resource, 0))}"


def where_am_i(device: str) -> dict[str, str]:
    """``node_id node_ip node_kind`` of the node that this trial really runs on, as columns of its record."""
    return {
        "node_id": ray.get_runtime_context().get_node_id(),
        "node_ip": ray.util.get_node_ip_address(),
        "node_kind": _kind_here(device),
    }


def nodes_stay(nodes: list[str], wait_s: float = MISSED_S) -> bool:
    """Whether a trial's nodes (none: this machine) are all there when the end of one would have been noticed: a group
    on a node that is gone would wait for ever, and the sweep itself runs the round on others."""
    end = time.monotonic() + (wait_s if nodes else 0.0)
    while set(nodes) <= {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
        if time.monotonic() >= end:
            return True
        time.sleep(1.0)
    return False


def selector(nodes: tuple[str, ...] | list[str]) -> dict[str, str]:
    """Label selector of these nodes alone."""
    return {NODE_LABEL: nodes[0] if len(nodes) == 1 else f"in({','.join(nodes)})"}
