"""The control trained with other seeds (``--seeds``), and the quality verdict of every cell from their spread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinydit_ray.bench.seeds import BETTER, WORSE, SeedSpread, seed_spread, worst
from tinydit_ray.config import AXES, CONTROL_DEFAULTS, CellConfig, cell_name
from tinydit_ray.grid import varying_axes
from tinydit_ray.record import flags_of
from tinydit_ray.sweep.plan import Cell, Round, cell_id_of

SEED_FLAG = "seed-spread"  # of rows that are the control with another seed: trained and scored, not timed
# What may differ between a cell and the control that it is judged by.
NOT_MATCHED = (*CONTROL_DEFAULTS, "seed", "cpus_per_worker", "gpus_per_worker")
SCORES = {"velocity_mse": "velocity MSE", "probe_fd": "probe-FD"}
# Cells that time their sampler all train alike: there it is what samples that is in question.
SAMPLED = {"velocity_mse": "sample_velocity_mse", "probe_fd": "probe_fd"}
Row = Mapping[str, Any]


def seed_rounds(cells: Sequence[Cell], content: Mapping[str, Any]) -> list[Round]:
    """A round for each control of the cells and each of the sweep's ``--seeds``, which follow on the cells' highest
    seed. ``content`` is that of ``sweep.json``."""
    digest = content["data"]["digest"]
    controls: dict[tuple[Any, ...], tuple[CellConfig, str]] = {}
    for cell in cells:
        key = (cell.kind, *_match({f"config.{k}": v for k, v in cell.control.asdict().items()}))
        controls.setdefault(key, (cell.control, cell.kind))
    first = 1 + max((cell.config.seed for cell in cells), default=0)
    names = varying_axes([control for control, _ in controls.values()]) if controls else []
    return [
        Round(_seed_cell(control.replace(seed=first + i), names, kind, digest), 1)
        for control, kind in controls.values()
        for i in range(content["grid"]["seeds"])
    ]


def _seed_cell(config: CellConfig, names: list[str], node_kind: str, data_digest: str) -> Cell:
    size = cell_name(config, names) if names else ""
    return Cell(
        config=config, control=config, times="nothing", flags=SEED_FLAG, kind=node_kind,
        cell_id=cell_id_of(config, node_kind, data_digest, 0, "nothing"),
        name=f"control {size} seed={config.seed}".replace("  ", " "),
    )  # fmt: skip


def after_first(rounds: Sequence[Round], extra: Sequence[Round]) -> list[Round]:
    """The extra rounds behind the first round of every cell: what is shortened by a budget comes after them."""
    place = sum(item.number == 1 for item in rounds)
    return [*rounds[:place], *extra, *rounds[place:]]


def is_seed_row(row: Row) -> bool:
    return SEED_FLAG in flags_of(row)


# --- verdicts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """A cell's verdict, and each score with the spread that it was held against."""

    verdict: str
    scores: dict[str, tuple[float, SeedSpread]]

    def words(self) -> str:
        """``worse: velocity MSE 0.4102 (seeds 0.3912 – 0.3968)``; only the scores that decided."""
        decided = [
            f"{SCORES[name]} {value:.4g} (seeds {spread.low:.4g} – {spread.high:.4g})"
            for name, (value, spread) in self.scores.items()
            if spread.judge(value) == self.verdict
        ]
        return f"{self.verdict}: {', '.join(decided)}"


def quality_verdicts(rows: Iterable[Row]) -> dict[str, Judged]:
    """cell_id -> verdict, of every cell with an ok round. ``rows`` are the last attempts of one sweep.

    A score is held only against seeds of the same size, batch and learning rate, trained for as many steps;
    probe-FD only against the same probe and number of images.
    """
    rows = list(rows)
    seeds = [row for row in rows if is_seed_row(row) and row["status"] == "ok"]
    found: dict[str, Judged] = {}
    for row in rows:
        if row["status"] != "ok" or is_seed_row(row):
            continue
        judged = _judge(row, seeds)
        if row["cell_id"] not in found or judged.scores:
            found[row["cell_id"]] = judged
    return found


def _judge(row: Row, seeds: Sequence[Row]) -> Judged:
    scores: dict[str, tuple[float, SeedSpread]] = {}
    for name in SCORES:
        value = row[name] if row["sample_ms_per_image"] is None else row[SAMPLED[name]]
        spread = seed_spread([other[name] for other in seeds if other[name] is not None and _same(name, row, other)])
        if value is not None and spread:
            scores[name] = (value, spread)
    return Judged(worst([spread.judge(value) for value, spread in scores.values()]), scores)


def _same(name: str, row: Row, other: Row) -> bool:
    keys = ["steps_trained"] + (["probe_id", "probe_fd_n"] if name == "probe_fd" else [])
    return _match(row) == _match(other) and all(row[key] == other[key] for key in keys)


def _match(row: Row) -> tuple[Any, ...]:
    return tuple(row[f"config.{name}"] for name in AXES if name not in NOT_MATCHED)


def verdict_lines(rows: Sequence[Row]) -> list[str]:
    """What is printed under the table: the spread of each control, and why a cell is not within it."""
    judged = quality_verdicts(rows)
    names = {row["cell_id"]: row["cell_name"] for row in rows}
    spreads = {spread: name for found in judged.values() for name, (_, spread) in found.scores.items()}
    lines = [
        f"one more seed of the control would have {SCORES[name]} {spread.low:.4g} – {spread.high:.4g}"
        f" (95 %, from {spread.seeds} seeds, mean {spread.mean:.4g})"
        for spread, name in spreads.items()
    ]
    lines += [f"{names[key]}: {found.words()}" for key, found in judged.items() if found.verdict in (WORSE, BETTER)]
    return lines
