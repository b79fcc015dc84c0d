"""``--dry-run --cluster FILE``: hours and dollars that a grid would take on the nodes of a cluster file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from tinydit_ray.config import CellConfig
from tinydit_ray.sweep import prices
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.plan import Round, round_estimate_s

START_S = 480.0  # a node from nothing to its first trial: machine, image, packages
HEAD_START_S = 600.0  # the head, before it asks for the first worker


@dataclass(frozen=True)
class Node:
    """A node type of a cluster file."""

    name: str
    instance: str
    count: int  # the most that may run
    spot: bool
    gpus: float
    cpus: float
    disk_gb: float

    def per_hour(self, provider: str) -> float:
        """Dollars, disk included. Raises UsageError where no price is known."""
        known = prices.ON_DEMAND[provider]
        if self.instance not in known:
            raise UsageError(
                f"--cluster: no price is known of {self.instance}; known: {', '.join(known)}"
                " (tinydit_ray/sweep/prices.py)"
            )
        share = prices.SPOT_SHARE if self.spot else 1.0
        return share * known[self.instance] + prices.disk_per_hour(provider, self.disk_gb)


@dataclass(frozen=True)
class Cluster:
    """What a cluster file says that an estimate needs. ``provider`` is aws, gcp or local; local machines cost nothing
    here and have no types."""

    path: Path
    provider: str
    region: str
    head: Node | None
    workers: Sequence[Node]
    idle_s: float


def read_cluster(path: Path) -> Cluster:
    """Raises UsageError in one line where the file is none of Ray's cluster files."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _cluster(path, content)
    except OSError as error:
        raise UsageError(f"--cluster {path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UsageError(f"--cluster {path}: not a cluster file of Ray's ({why[:160]})") from None


def _cluster(path: Path, content: Mapping[str, Any]) -> Cluster:
    provider = content["provider"]
    kind, idle_s = str(provider["type"]), 60.0 * float(content.get("idle_timeout_minutes") or 0)
    if kind == "local":
        workers = [Node("worker", "your machine", len(provider["worker_ips"]), False, 0, 0, 0)]
        return Cluster(path, kind, "", None, workers, idle_s)
    if kind not in prices.ON_DEMAND:
        raise ValueError(f"provider {kind}: prices are known of {', '.join(prices.ON_DEMAND)}")
    most = int(content["max_workers"])
    nodes = {name: _node(name, spec, most) for name, spec in content["available_node_types"].items()}
    head = nodes.pop(content["head_node_type"])
    return Cluster(path, kind, str(provider["region"]), head, list(nodes.values()), idle_s)


def _node(name: str, spec: Mapping[str, Any], most: int) -> Node:
    config, resources = spec["node_config"], spec.get("resources") or {}
    instance = str(config.get("InstanceType") or config["machineType"])
    spot = "InstanceMarketOptions" in config or "SPOT" in str(config.get("scheduling"))
    count = min(int(spec.get("max_workers", most)), most)
    return Node(
        name, instance, count, spot, float(resources.get("GPU", 0)), float(resources.get("CPU", 0)), _disk_gb(config)
    )


def _disk_gb(config: Mapping[str, Any]) -> float:
    aws = [float(disk["Ebs"]["VolumeSize"]) for disk in config.get("BlockDeviceMappings") or ()]
    gcp = [float(disk["initializeParams"]["diskSizeGb"]) for disk in config.get("disks") or ()]
    return sum(aws + gcp)


# --- the estimate -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """``hours`` from the start of the head to the last result; ``busy_s`` of all trials together."""

    node: Node
    nodes: float
    hours: float
    busy_s: float
    workers_usd: float
    head_usd: float


def estimate(cluster: Cluster, rounds: Sequence[Round], options: SweepOptions) -> Estimate:
    """Raises UsageError where no node type of the file could run a trial."""
    configs = [item.cell.config for item in rounds]
    cuda, local = configs[0].device == "cuda", cluster.provider == "local"
    fits = [node for node in cluster.workers if local or bool(node.gpus) == cuda]
    fits = [node for node in fits if max(nodes_of(config, node) for config in configs) <= node.count]
    if not fits:
        raise UsageError(f"--cluster {cluster.path}: no worker type has what a trial asks for ({_asked(rounds)})")
    node = fits[0]
    seconds = [round_estimate_s(item, options) for item in rounds]
    spans = [nodes_of(config, node) for config in configs]
    nodes = min(node.count, sum(spans))
    busy = sum(s * span for s, span in zip(seconds, spans, strict=True))
    last = max(busy / nodes, *seconds)  # one trial at a time on a node
    starting = 0.0 if cluster.provider == "local" else HEAD_START_S + START_S
    hours = (starting + last) / 3600
    if cluster.head is None:
        return Estimate(node, nodes, hours, busy, 0.0, 0.0)
    billed = nodes * (START_S + last + cluster.idle_s) / 3600
    head = (starting + last + cluster.idle_s) / 3600 * cluster.head.per_hour(cluster.provider)
    return Estimate(node, nodes, hours, busy, billed * node.per_hour(cluster.provider), head)


def nodes_of(config: CellConfig, node: Node) -> float:
    """How many nodes of this type a trial's workers fill; infinity where not even one worker fits."""
    shares = [node.cpus // config.cpus_per_worker] if node.cpus else []
    if config.gpus_per_worker:
        shares.append(node.gpus // config.gpus_per_worker)
    fit = min(shares, default=config.workers)  # machines of your own: nobody knows
    return math.ceil(config.workers / fit) if fit else math.inf


def _asked(rounds: Sequence[Round]) -> str:
    cell = rounds[0].cell.config
    cpus = max(item.cell.config.cpus_per_worker for item in rounds)
    workers = max(item.cell.config.workers for item in rounds)
    return f"{workers} × {cpus} CPUs, {cell.gpus_per_worker} GPUs, device {cell.device}"


def print_cost(console: Console, cluster: Cluster, rounds: Sequence[Round], options: SweepOptions) -> None:
    found = estimate(cluster, rounds, options)
    kind = f"{'spot ' if found.node.spot else ''}{found.node.instance}"
    cells = len({item.cell.cell_id for item in rounds})
    lines = [
        f"on {cluster.path.name}: {cells:,} cells in {len(rounds):,} trials on {found.nodes:g} × {kind}:"
        f" about {_hours(found.hours)}, {found.busy_s / 3600:.1f} node-hours of trials"
    ]
    if cluster.head is not None:
        lines.append(
            f"about ${found.workers_usd + found.head_usd:,.2f}: workers ${found.workers_usd:,.2f},"
            f" head ({cluster.head.instance}) ${found.head_usd:,.2f}"
        )
    for line in [*lines, *(f"  - {line}" for line in assumptions(cluster, found))]:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def assumptions(cluster: Cluster, found: Estimate) -> list[str]:
    """What the numbers rest on, in words."""
    lines = [
        f"one trial at a time on a node, {found.nodes:g} of at most {found.node.count} nodes all the time",
        "seconds of a trial as estimated for two CPU cores: an upper bound on larger ones, and a guess where nothing"
        " was timed yet",
    ]
    if cluster.head is None:
        return [*lines, "machines of your own: no price, and nothing to start"]
    return [
        *lines,
        f"{HEAD_START_S / 60:.0f} minutes for the head and {START_S / 60:.0f} for a worker until its first trial,"
        f" {cluster.idle_s / 60:.0f} idle minutes of each worker before it is returned, `ray down` at once",
        f"list prices of {prices.REGIONS[cluster.provider]}, written down {prices.DATE}"
        + (
            f"; the file's region is {cluster.region}, whose prices differ"
            if cluster.region != prices.REGIONS[cluster.provider]
            else ""
        ),
        *(
            [f"spot taken as {100 * prices.SPOT_SHARE:.0f} % of the list price, and no node lost"]
            if found.node.spot
            else ["on demand"]
        ),
        "disks as in the file; no traffic, taxes or storage",
    ]


def _hours(hours: float) -> str:
    minutes = math.ceil(60 * hours)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
