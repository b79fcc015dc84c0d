"""From options to the list of rounds to run: resolved cells, their controls, a random order per round."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from tinydit_ray.config import CellConfig, cell_name, control_of, short_hash
from tinydit_ray.grid import GridError, varying_axes
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.options import SweepOptions

# For the estimate of a sweep's duration alone, seconds on two CPU cores; the screen learns better ones.
COMPILE_S = 40.0
START_S = 9.0
STEP_S = 0.25  # at 128/4/4 and batch 128
CHECK_STEPS = 17


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A grid point on this sweep's data and machine."""

    config: CellConfig
    control: CellConfig
    cell_id: str
    name: str
    repeat: int = 0

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
        defaults["gpus_per_worker"] = 1
    try:
        configs, duplicates = options.grid.resolve(defaults, options.sets)
        names = varying_axes(configs)
        cells = [
            Cell(
                config=config, repeat=repeat,
                control=config if options.self_control else control_of(config, options.control),
                cell_id=_cell_id(config, node_kind, data_digest, repeat),
                name=cell_name(config, names) + (f" #{repeat}" if options.repeats > 1 else ""),
            )
            for config in configs
            for repeat in (range(1, options.repeats + 1) if options.repeats > 1 else (0,))
        ]  # fmt: skip
    except GridError as error:
        raise UsageError(str(error)) from None
    except ValueError as error:
        raise UsageError(f"--control: {error}") from None
    return cells, duplicates


def _cell_id(config: CellConfig, node_kind: str, data_digest: str, repeat: int) -> str:
    identity = {"config": config.asdict(), "node_kind": node_kind, "data": data_digest}
    return short_hash(identity | ({"repeat": repeat} if repeat else {}))


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
    return START_S + compile_s + CHECK_STEPS * step_s + options.time_s / options.rounds + training
