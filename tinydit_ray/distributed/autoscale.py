"""Nodes that are not there yet: what the cluster's autoscaler could add, asking it, and waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ray.autoscaler.sdk import request_resources

from tinydit_ray.config import CellConfig
from tinydit_ray.distributed.node_types import KIND_LABEL, types_of_cluster
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.kinds import WAIT_S, minutes_words
from tinydit_ray.sweep.placement import Node, hold

POLL_S = 1.0
Nodes = Callable[[], list[Node]]  # those there are now
Tell = Callable[[str], None]


class Autoscaler:
    """The cluster's autoscaler as a sweep sees it. It has no ``types`` for the machines of a local
    cluster file, or where there is no autoscaler at all; a wait has to be asked for then (``--wait-nodes``)."""

    def __init__(self, wait_s: float | None) -> None:
        self.types = types_of_cluster()
        self.limit_s = wait_s if wait_s is not None else (WAIT_S if self.types else 0.0)
        self._asked: list[dict[str, float]] = []

    def ask(self, cell: CellConfig, count: int, kind: str | None, cpus: int = 0) -> None:
        """Ask for as many nodes as hold ``count`` of the cell's workers, or for nodes of ``cpus``. The request stands
        until the next one."""
        bundle: dict[str, float] = {"CPU": max(cpus, cell.cpus_per_worker)}
        if cell.gpus_per_worker:
            bundle["GPU"] = cell.gpus_per_worker
        if self.types and (wanted := [bundle] * count) != self._asked:
            labels = [{KIND_LABEL: kind}] * count if kind else None
            request_resources(bundles=wanted, bundle_label_selectors=labels)
            self._asked = wanted

    def close(self) -> None:
        """Nodes that only this sweep wanted may go."""
        if self._asked:
            request_resources(num_cpus=0)
            self._asked = []

    def await_room(self, cells: Sequence[CellConfig], kind: str | None, nodes: Nodes, tell: Tell) -> None:
        """Wait until some node has room for each cell's workers. Raises UsageError, at once where no type of node
        could ever have it, else after the limit."""
        for cell in sorted(set(cells), key=lambda cell: -cell.cpus_per_worker * cell.workers):
            if not self._has_room(cell, kind, nodes()) and self.limit_s:
                self._await(cell, kind, nodes, tell)

    def _await(self, cell: CellConfig, kind: str | None, nodes: Nodes, tell: Tell) -> None:
        asked = f"{cell.workers} × {cell.cpus_per_worker} CPU" if cell.workers > 1 else f"{cell.cpus_per_worker} CPU"
        asked += f" and {cell.gpus_per_worker} GPU" if cell.gpus_per_worker else ""
        asked += f" of kind {kind}" if kind else ""
        able = [node for node in self.types if node.takes(cell, kind)]
        if self.types and not able:
            known = ", ".join(map(str, self.types))
            raise UsageError(f"a trial asks for {asked}; no type of node has that: {known}")
        can = f"the cluster can add {', '.join(map(str, able))}" if able else "nodes may join"
        tell(f"waiting for {asked}: no node has that yet; {can}; {minutes_words(self.limit_s)} at most (--wait-nodes)")
        self.ask(cell, cell.workers, kind)
        start = time.monotonic()
        while not self._has_room(cell, kind, nodes()):
            if time.monotonic() - start > self.limit_s:
                self.close()
                raise UsageError(f"waited {minutes_words(self.limit_s)} for {asked}: no such node came (--wait-nodes)")
            time.sleep(POLL_S)
        tell(f"there after {time.monotonic() - start:.0f} s")

    @staticmethod
    def _has_room(cell: CellConfig, kind: str | None, nodes: list[Node]) -> bool:
        return hold((node for node in nodes if kind in (None, node.kind)), cell)
