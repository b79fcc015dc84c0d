"""From options to the list of rounds to run: resolved cells, their controls, a random order per round."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from tinydit_ray.config import CellConfig, cell_name, control_of, short_hash
from tinydit_ray.grid import GridError, varying_axes
from tinydit_ray.network import check_networks
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.options import SweepOptions

# For the estimate of a sweep's duration alone, seconds on two CPU cores; the screen learns better ones.
COMPILE_S = 40.0
START_S = 9.0
STEP_S = 0.25  # at 128/4/4 and batch 128
CHECK_STEPS = 17
SCORINGS = 11  # of a quality grid
NAMES_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A grid point on this sweep's data and machine."""

    config: CellConfig
    control: CellConfig
    cell_id: str
    name: str
    repeat: int = 0
    times: str = "step"  # or "sampler", "quality", "nothing": what is timed
    flags: str = ""  # that its rows carry from the start
    kind: str = ""  # of the nodes that it runs on

    @property
    def slug(self) -> str:
        """Folder name of the cell: its name cleaned, and its id."""
        clean = "".join(c if c.isalnum() or c in "-.=" else "-" for c in self.name)
        return f"{clean[:80]}-{self.cell_id}"


@dataclass(frozen=True)
class Round:
    """One trial: a cell in its n-th process."""

    cell: Cell
    number: int


def make_cells(
    options: SweepOptions, *, device: str, cpus: int, node_kind: str, data_digest: str
) -> tuple[list[Cell], int]:
    """The sweep's cells and how many duplicates were dropped. Raises UsageError."""
    defaults = {"model": "base" if device == "cuda" else "tiny", "device": device, "cpus_per_worker": cpus}
    if device == "cuda":
        defaults["gpus_per_worker"] = 1 if options.gpus_per_worker is None else options.gpus_per_worker
    try:
        configs, duplicates = options.grid.resolve(defaults, options.sets)
        if options.spread is not None:
            configs = list({c.config_id: c for config in configs for c in options.spread(config)}.values())
        try:
            check_networks(configs)
        except ValueError as error:
            raise GridError(str(error)) from None
        names = varying_axes(configs)
        times = options.times or what_is_timed(configs)
        cells = [
            Cell(
                config=config, repeat=repeat, times=times, kind=node_kind,
                control=config if options.self_control else control_of(config, options.control),
                cell_id=cell_id_of(config, node_kind, data_digest, repeat, times),
                name=cell_name(config, names) + (f" #{repeat}" if options.repeats > 1 else ""),
            )
            for config in configs
            for repeat in (range(1, options.repeats + 1) if options.repeats > 1 else (0,))
        ]  # fmt: skip
    except GridError as error:
        raise UsageError(str(error)) from None
    except ValueError as error:
        raise UsageError(f"--control: {error}") from None
    return only(cells, options.only), duplicates


def only(cells: list[Cell], patterns: Iterable[str]) -> list[Cell]:
    """The cells whose name or id fits one of the patterns (``--only``; * and ? as in a shell); all without any."""
    patterns = list(patterns)
    for pattern in patterns:
        if not any(_fits(cell, pattern) for cell in cells):
            names = ", ".join(repr(cell.name) for cell in cells[:NAMES_SHOWN])
            more = ", …" if len(cells) > NAMES_SHOWN else ""
            raise UsageError(f"--only {pattern!r}: no cell is called so; the grid has {names}{more}")
    return [cell for cell in cells if not patterns or any(_fits(cell, pattern) for pattern in patterns)]


def _fits(cell: Cell, pattern: str) -> bool:
    return fnmatchcase(cell.name, pattern) or cell.cell_id == pattern


def what_is_timed(configs: Iterable[CellConfig]) -> str:
    """``sampler`` where any cell asks for one that is not eager: then the eager one is timed alike, for comparison."""
    return "sampler" if any(config.sampler != "eager" for config in configs) else "step"


def cell_id_of(config: CellConfig, node_kind: str, data_digest: str, repeat: int, times: str) -> str:
    identity: dict[str, Any] = {"config": config.identity(), "node_kind": node_kind, "data": data_digest}
    identity |= {"repeat": repeat} if repeat else {}
    return short_hash(identity | ({"times": times} if times != "step" else {}))


def make_rounds(cells: list[Cell], rounds: int, seed: str) -> list[Round]:
    """Every cell once per round, each round in a fresh random order; the order follows from ``seed`` alone."""
    order: list[Round] = []
    for number in range(1, rounds + 1):
        shuffled = list(cells)
        random.Random(f"{seed}/{number}").shuffle(shuffled)
        order += [Round(cell, number) for cell in shuffled]
    return order


def estimate_s(rounds: Iterable[Round], options: SweepOptions) -> float:
    """Rough seconds that these rounds take."""
    return sum(round_estimate_s(item, options) for item in rounds)


def round_estimate_s(item: Round, options: SweepOptions) -> float:
    config, first = item.cell.config, item.number == 1
    scale = config.dim * config.dim * config.depth * config.batch_size / (128 * 128 * 4 * 128)
    step_s = STEP_S * max(scale, 0.1) * (0.01 if config.device == "cuda" else 1.0)
    compiles = config.compile != "off"
    compile_s = COMPILE_S * (1.0 if first else 0.25) if compiles else 0.0
    sampling_s = 20 * options.fd_images / config.batch_size * step_s / 3
    training = options.steps * step_s + 16 * step_s / 3 + sampling_s if first else 0.0
    if item.cell.times == "quality":
        training_s = options.train_s or options.steps * step_s
        return START_S + compile_s + training_s + SCORINGS * 16 * step_s / 3 + sampling_s
    timing = 0.0 if item.cell.times == "nothing" else CHECK_STEPS * step_s + options.time_s / options.rounds
    return START_S + compile_s + timing + training
