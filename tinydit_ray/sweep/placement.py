"""Where trials run: nodes with their kinds, and which of them are free.

One trial at a time on a node, unless a person asks for more: two trials on one machine slow each other down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tinydit_ray.config import CellConfig

PER_GPU = "per-gpu"


@dataclass(frozen=True)
class Node:
    """A machine that trials may run on. ``cpus`` and ``gpus`` are those that trials may have; the id is Ray's, ""
    for this machine."""

    id: str
    ip: str
    kind: str
    cpus: int
    gpus: int = 0

    def room(self, cell: CellConfig, held: Sequence[tuple[int, int]] = ()) -> int:
        """How many workers of the cell fit beside what trials hold of (CPUs, GPUs)."""
        cpus, gpus = self.cpus - sum(c for c, _ in held), self.gpus - sum(g for _, g in held)
        by_cpu = cpus // cell.cpus_per_worker
        return max(0, min(by_cpu, gpus // cell.gpus_per_worker) if cell.gpus_per_worker else by_cpu)


def hold(nodes: Iterable[Node], cell: CellConfig) -> bool:
    """Whether these nodes would take the cell's workers if nothing else ran."""
    return sum(node.room(cell) for node in nodes) >= cell.workers


@dataclass(frozen=True)
class Place:
    """The nodes that a trial was given, and how many trials run at a time on their machine."""

    nodes: tuple[str, ...]
    together: int = 1


class Placement:
    """Gives trials their nodes. ``concurrent`` is None for one trial per node, a number for as many in all, or
    ``per-gpu`` for one per GPU of each node."""

    def __init__(self, nodes: Iterable[Node], concurrent: int | str | None = None) -> None:
        self.nodes = list(nodes)
        self.concurrent = concurrent
        self._held: dict[str, dict[str, tuple[int, int]]] = {}  # trial -> node id -> CPUs, GPUs

    @property
    def running(self) -> int:
        return len(self._held)

    def has_room(self, cell: CellConfig, kind: str) -> bool:
        return bool(self._choose(cell, kind))

    def can_ever(self, cell: CellConfig, kind: str) -> bool:
        """Whether the nodes there are would take the cell if nothing else ran."""
        return hold(self._of(kind), cell)

    def take(self, trial: str, cell: CellConfig, kind: str) -> Place:
        """Give the trial its nodes; ``has_room`` was asked before."""
        shares = {
            node.id: (n * cell.cpus_per_worker, n * cell.gpus_per_worker) for node, n in self._choose(cell, kind)
        }
        self._held[trial] = shares
        return Place(tuple(shares), self._together(cell, next(iter(shares))))

    def release(self, trial: str) -> None:
        self._held.pop(trial, None)

    def slots(self, cell: CellConfig, kind: str) -> int:
        """How many trials of such a cell run at once."""
        nodes = [node for node in self._of(kind) if node.room(cell)]
        if self._is_shared(cell):
            room = sum(node.room(cell) for node in nodes) // cell.workers
            return max(1, min(room, self.concurrent) if isinstance(self.concurrent, int) else room)
        return max(1, len(nodes) if cell.workers == 1 else sum(node.room(cell) for node in nodes) // cell.workers)

    def _of(self, kind: str) -> list[Node]:
        return [node for node in self.nodes if node.kind == kind]

    def _is_shared(self, cell: CellConfig) -> bool:
        """Whether a node may have several trials at a time."""
        return isinstance(self.concurrent, int) or (self.concurrent == PER_GPU and cell.gpus_per_worker > 0)

    def _choose(self, cell: CellConfig, kind: str) -> list[tuple[Node, int]]:
        """Nodes with the number of the cell's workers on each; the emptiest first. Empty where they do not fit now."""
        if isinstance(self.concurrent, int) and self.running >= self.concurrent:
            return []
        free = []
        for node in self._of(kind):
            held = [shares[node.id] for shares in self._held.values() if node.id in shares]
            if (room := node.room(cell, held)) and (not held or self._is_shared(cell)):
                free.append((len(held), -room, node))
        chosen: list[tuple[Node, int]] = []
        left = cell.workers
        for _, room, node in sorted(free, key=lambda entry: entry[:2]):
            if left > 0:
                chosen.append((node, min(left, -room)))
                left -= chosen[-1][1]
        return chosen if left == 0 else []

    def _together(self, cell: CellConfig, node_id: str) -> int:
        """Trials at a time on the node's machine: nodes of one address are one machine."""
        ip = next(node.ip for node in self.nodes if node.id == node_id)
        here = [node for node in self.nodes if node.ip == ip and node.room(cell)]
        if isinstance(self.concurrent, int):
            return min(self.concurrent, max(1, sum(node.room(cell) for node in here)))
        return sum(node.room(cell) for node in here) if self._is_shared(cell) else len(here)
