"""Kinds of node: which of them a sweep runs on, and rows by kind, which are never compared with each other."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tinydit_ray.arguments import count, duration
from tinydit_ray.grid import PLACEMENTS
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.placement import PER_GPU, Node

if TYPE_CHECKING:
    from tinydit_ray.sweep.options import SweepOptions

EVERY_KIND = PLACEMENTS[1]
WAIT_S = 900.0  # for a node that is not there yet


@dataclass(frozen=True)
class Kind:
    """Nodes whose timings may be compared: how many there are, and what the smallest of them has."""

    name: str
    nodes: int
    cpus: int
    gpus: int = 0

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPU" if self.gpus else ""
        return f"{self.name} ({self.nodes} × {self.cpus} CPU{gpus})"


def add_placement(where: argparse._ArgumentGroup) -> None:
    """The options of where on a cluster trials run."""
    where.add_argument(
        "--concurrent", type=_concurrent, metavar="N",
        help="trials at a time in all, or per-gpu; on one machine more than 1 flags the rows (default: 1 per node)",
    )  # fmt: skip
    where.add_argument("--on", metavar="KIND", help="only nodes of this kind (records: node_kind)")
    where.add_argument(
        "--placement", choices=PLACEMENTS,
        help="each cell on one kind of node, or on every kind that the cluster has (default: the grid file's, else"
        " one-kind: that with most CPUs)",
    )  # fmt: skip
    where.add_argument(
        "--wait-nodes", dest="wait_nodes_s", type=duration, metavar="15m",
        help="wait this long for nodes that are not there yet (default: 15m where the cluster can add nodes, else not)",
    )  # fmt: skip


def _concurrent(text: str) -> int | str:
    return PER_GPU if text == PER_GPU else count(1)(text)


def kinds_of(nodes: Iterable[Node]) -> list[Kind]:
    """The kinds of these nodes, the one with most CPUs in all first."""
    found: dict[str, list[Node]] = {}
    for node in nodes:
        found.setdefault(node.kind, []).append(node)
    kinds = [
        Kind(name, len(group), min(n.cpus for n in group), min(n.gpus for n in group)) for name, group in found.items()
    ]
    return sorted(kinds, key=lambda kind: (-kind.nodes * kind.cpus, kind.name))


def choose_kinds(options: SweepOptions, nodes: Sequence[Node], console: Console) -> list[Kind]:
    """The kinds that the sweep runs on; says which where that was left open. Raises UsageError."""
    kinds = kinds_of(nodes)
    known = ", ".join(map(str, kinds)) or "none with a CPU for trials"
    if options.placement == EVERY_KIND:
        if options.on:
            raise UsageError(f"--on {options.on} and --placement {EVERY_KIND}: give one of them")
        if kinds:
            return kinds
    chosen = [kind for kind in kinds if options.on in (None, kind.name)][:1]
    if not chosen:
        asked = f"--on {options.on}: no node is of this kind" if options.on else "no node can run a trial"
        raise UsageError(f"{asked}; there is {known}")
    if len(kinds) > 1 and not options.on:
        console.print(
            f"nodes: {chosen[0]}, since this kind has most CPUs of {known}; --on KIND chooses another,"
            f" --placement {EVERY_KIND} takes all",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    return chosen


def cpus_on(kind: Kind, options: SweepOptions) -> int:
    """CPUs of each worker on nodes of this kind, where nobody says: all, shared by the most workers of a cell."""
    from tinydit_ray.sweep.workers import most_workers

    return options.cpus_per_worker or max(1, kind.cpus // most_workers(options))


def by_kind(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows by the kind of node that they are of, in the order the kinds appear."""
    found: dict[str, list[Any]] = {}
    for row in rows:
        found.setdefault(row.get("node_kind") or "", []).append(row)
    return found


def each_kind(console: Console, rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Rows of one kind after the other, under its name where there are several: a table each, since kinds are never
    compared."""
    kinds = by_kind(rows)
    for kind, group in kinds.items():
        if len(kinds) > 1:
            console.print(f"on {kind}", style="bold", highlight=False)
        yield kind, group


def minutes_words(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
