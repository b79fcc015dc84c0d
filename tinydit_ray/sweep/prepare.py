"""What is decided before a sweep's folder is made: device, data, machine, versions, cells."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tinydit_ray.bench.machine import granted_cpus, machine_facts, node_kind, versions
from tinydit_ray.storage import Storage, StorageError
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.folder import git_commit
from tinydit_ray.sweep.kinds import EVERY_KIND, choose_kinds
from tinydit_ray.sweep.options import SweepOptions
from tinydit_ray.sweep.placement import Node
from tinydit_ray.sweep.plan import Cell, make_cells
from tinydit_ray.sweep.spread import cells_on, check_room
from tinydit_ray.sweep.workers import check_workers, default_cpus

if TYPE_CHECKING:
    from tinydit_ray.distributed.cluster import RayCluster


def check_ray() -> None:
    """Raises UsageError where there is no Ray."""
    if find_spec("ray") is None:
        raise UsageError("Ray is not installed: pip install 'tinydit-ray[ray,mlflow]', or use --no-ray")


def prepare(
    options: SweepOptions, console: Console, cluster: RayCluster | None = None
) -> tuple[dict[str, Any], list[Cell], int]:
    """Everything that is decided before a folder is made: device, data, machine, nodes, cells."""
    if options.ray:
        check_ray()
    device = cluster.nodes.device if cluster else resolve_device(options, console)
    if options.gpus_per_worker and device == "cpu":
        raise UsageError(f"--gpus-per-worker {options.gpus_per_worker}: cells on the CPU have none; give --device cuda")
    cpus = options.cpus_per_worker or default_cpus(options)
    if not (options.address or options.cluster):
        check_cpus(options, cpus)
    check_storage(options)
    # the grid is checked before the data is touched: a typing mistake must not cost a decode
    least = options.cpus_per_worker or (1 if cluster else cpus)
    sketch, _ = make_cells(options, device=device, cpus=least, node_kind="", data_digest="")
    if cluster:
        cluster.autoscaler.await_room(
            [cell.config for cell in sketch], options.on, cluster.nodes.alive,
            lambda words: console.print(f"nodes: {words}", highlight=False, soft_wrap=True),
        )  # fmt: skip
    nodes = cluster.nodes.alive() if cluster else [Node("", "", node_kind(device), cpus, 1)]
    kinds = choose_kinds(options, nodes, console)
    own = None if cluster else cpus  # of each worker; on a cluster its nodes decide
    cells, _ = cells_on(kinds, options, cpus=own, device=device, data_digest="")
    check_workers(options, [cell.config for cell in cells])
    if cluster:
        check_room(cells, nodes)
    data = prepare_data(options, console)
    check_batches(cells, data["images"])
    cells, duplicates = cells_on(kinds, options, cpus=own, device=device, data_digest=data["digest"])
    if cells[0].times == "sampler":
        console.print("this grid varies sampler: every cell is timed by its sampler, in ms per image")
    content = {
        **_origin(options, data),
        "node_kind": kinds[0].name,
        "nodes": [dataclasses.asdict(node) for node in nodes] if cluster else [],
        "grid": _resolved_grid(options, cells),
    }
    if cluster and options.placement != EVERY_KIND:
        options.given["on"] = kinds[0].name  # a resumed sweep goes on there, whatever nodes there are then
    return content, cells, duplicates


def _origin(options: SweepOptions, data: dict[str, Any]) -> dict[str, Any]:
    """What ``sweep.json`` says of when, where and from what the sweep was made."""
    return {
        "sweep_id": uuid.uuid4().hex[:12],
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "product_version": product_version(),
        "git_commit": git_commit(),
        "machine": {**machine_facts(), "node_id": node_id()},
        "versions": versions(),
        "data": data,
        "storage": options.storage,
        "command": options.command,
        "options": options.given,
    }


def _resolved_grid(options: SweepOptions, cells: Sequence[Cell]) -> dict[str, Any]:
    return {
        "name": options.grid_name, "rounds": options.rounds, "time_s": options.time_s, "steps": options.steps,
        "ci": options.ci, "seeds": options.seeds, "ema": options.ema,
        "cells": [{"name": c.name, "cell_id": c.cell_id, **c.config.asdict()} for c in cells],
        "control": options.control,
    }  # fmt: skip


def check_cpus(options: SweepOptions, cpus: int) -> None:
    """Raises UsageError where this machine has fewer CPUs than its trials (``cpus`` each) ask for."""
    if options.cpus_per_worker and options.cpus_per_worker > granted_cpus():
        raise UsageError(f"--cpus-per-worker {options.cpus_per_worker}: this machine has {granted_cpus()} CPUs")
    at_once = options.concurrent if isinstance(options.concurrent, int) else 1
    if at_once * cpus > granted_cpus() and at_once > 1:
        raise UsageError(
            f"--concurrent {at_once} with {cpus} CPUs per trial: this machine has {granted_cpus()} CPUs;"
            f" at most --cpus-per-worker {max(1, granted_cpus() // at_once)} fits"
        )


def check_batches(cells: Sequence[Cell], images: int) -> None:
    """Raises UsageError where a batch would hold more images than there are to train on."""
    largest = max(cell.config.batch_size for cell in cells)
    if largest > images:
        raise UsageError(f"batch_size {largest}: there are {images} training images; possible: up to {images}")


def check_storage(options: SweepOptions) -> None:
    """Raises UsageError where trained weights could not be kept: found out after hours it would be too late."""
    if options.storage and not options.dry_run:
        try:
            Storage(options.storage).check()
        except StorageError as error:
            raise UsageError(f"--storage {options.storage}: {error}") from None


def resolve_device(options: SweepOptions, console: Console) -> str:
    """The device, and a word why, where it was left open."""
    if options.device != "auto":
        return options.device
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.cuda.get_device_name() if device == "cuda" else "no CUDA device was found"
    console.print(f"device: {device}, since {'there is ' if device == 'cuda' else ''}{found}")
    return device


def prepare_data(options: SweepOptions, console: Console) -> dict[str, Any]:
    """Find and decode the data once, before any trial."""
    from tinydit_ray import data

    try:
        spec, why = data.resolve(options.data, options.classes)
        console.print(why, highlight=False)
        start = time.perf_counter()
        spec = data.prepare(spec)
        train = data.load(spec, "train")
    except data.DataError as error:
        raise UsageError(str(error)) from None
    took = time.perf_counter() - start
    console.print(
        f"data: {len(train):,} training images, digest {spec.digest}, ready after {took:.1f} s", highlight=False
    )
    for note in train.notes:
        console.print(f"data: {note}", highlight=False)
    return {"source": train.source, "digest": spec.digest, "spec": spec.as_dict(), "images": len(train)}


def product_version() -> str:
    try:
        return metadata.version("tinydit-ray")
    except metadata.PackageNotFoundError:
        return "0+checkout"


def node_id() -> str:
    import socket

    return socket.gethostname()
