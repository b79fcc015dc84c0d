"""The cells of a sweep spread over kinds of node."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.kinds import Kind, cpus_on
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.placement import Node, hold
from tinydit_ray.sweep.plan import Cell, make_cells


def cells_on(
    kinds: Sequence[Kind], options: SweepOptions, *, cpus: int | None, device: str, data_digest: str
) -> tuple[list[Cell], int]:
    """The cells on each kind of node, and how many duplicates were dropped; named with their kind where there are
    several. ``cpus`` are those of each worker, None for what the kind has."""
    cells: list[Cell] = []
    for kind in kinds:
        found, duplicates = make_cells(
            options, device=device, cpus=cpus or cpus_on(kind, options), node_kind=kind.name, data_digest=data_digest
        )
        many = len(kinds) > 1
        cells += [dataclasses.replace(cell, name=f"{cell.name} @{kind.name}") if many else cell for cell in found]
    return cells, duplicates


def check_room(cells: Sequence[Cell], nodes: Sequence[Node]) -> None:
    """Raises UsageError where the nodes of a cell's kind can never hold it: it would wait for ever."""
    for cell in cells:
        config, here = cell.config, [node for node in nodes if node.kind == cell.kind]
        if not hold(here, config):
            gpus = f" and {config.gpus_per_worker} GPU" if config.gpus_per_worker else ""
            have = ", ".join(f"{node.cpus} CPU" + (f" {node.gpus} GPU" if node.gpus else "") for node in here)
            raise UsageError(
                f"{cell.name}: asks for {config.workers} × {config.cpus_per_worker} CPU{gpus}; the nodes of kind"
                f" {cell.kind} have {have or 'none'}"
            )
