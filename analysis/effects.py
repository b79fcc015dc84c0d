"""What each switch does, and which helps only together with which: contrasts of log speed-ups over matched cells.

The effect of a value is the mean difference of log speed-up between cells that are alike in everything but this
axis, one with the value and one with the reference (the control's value where the grid has it). So a grid may be
unbalanced: a setting that ran only with compile is compared only with compile. On a full factorial grid this is the
least-squares fit. The interaction of two values is the difference of differences over fours of matched cells. Each is a
weighted sum of the cells' estimates, so its standard error follows from theirs (independent processes), with the
smallest of their degrees of freedom.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.cells import Cell
from tinydit_ray.bench.stats import LEVEL, t_quantile
from tinydit_ray.config import AXES

Key = tuple[Hashable, ...]


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A ratio of speeds (above 1 is faster) with its interval, and over how many matched cells it is a mean."""

    value: float
    low: float
    high: float
    n: int
    least: float  # the smallest and the largest of the n
    most: float

    @property
    def helps(self) -> bool:
        return self.low > 1

    @property
    def harms(self) -> bool:
        return self.high < 1


@dataclass(frozen=True, kw_only=True)
class Effect:
    axis: str
    value: Any
    reference: Any
    contrast: Contrast


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """``value`` of ``axis`` without and with ``other_value`` of ``other``; ``contrast`` is the ratio of the two."""

    axis: str
    value: Any
    other: str
    other_value: Any
    without: Contrast
    together: Contrast
    contrast: Contrast

    @property
    def words(self) -> str:
        this, that = f"{self.axis}={self.value}", f"{self.other}={self.other_value}"
        numbers = f"{self.together.value:.2f} × with it, {self.without.value:.2f} × without"
        if not (self.contrast.helps or self.contrast.harms):
            return f"{this} does alike with and without {that} ({numbers})"
        if self.contrast.helps and self.together.helps and not self.without.helps:
            return f"{this} helps only together with {that} ({numbers})"
        if self.contrast.harms and self.without.helps and not self.together.helps:
            return f"{this} helps only without {that} ({numbers})"
        return f"{this} does {'more' if self.contrast.helps else 'less'} together with {that} ({numbers})"


def varying(cells: Sequence[Cell]) -> list[str]:
    """Axes with more than one value among cells that have a speed-up with its error."""
    known = _known(cells)
    return [axis for axis in ("model", *AXES) if len({cell["setup"].get(axis) for cell in known}) > 1]


def effects(cells: Sequence[Cell]) -> list[Effect]:
    """The effect of every value that has matched cells, in the order of the axes."""
    table, axes = _table(cells)
    found = []
    for place, axis in enumerate(axes):
        reference, others = _levels(table, place, axis)
        for value in others:
            pairs = [
                (key, base) for key in table
                if key[place] == value and (base := _swap(key, place, reference)) in table
            ]  # fmt: skip
            if pairs:
                terms = [{key: 1.0, base: -1.0} for key, base in pairs]
                found.append(Effect(axis=axis, value=value, reference=reference, contrast=_contrast(table, terms)))
    return found


def interactions(cells: Sequence[Cell]) -> list[Interaction]:
    """Of every two values of two axes with matched fours; the surest first. Intervals of the interactions allow for
    how many were looked at (Bonferroni)."""
    table, axes = _table(cells)
    looked = [
        (one, two, a, b, fours)
        for one, two in itertools.combinations(range(len(axes)), 2)
        for a in _levels(table, one, axes[one])[1]
        for b in _levels(table, two, axes[two])[1]
        if (fours := _fours(table, axes, one, two, a, b))
    ]
    level = 1 - (1 - LEVEL) / max(1, len(looked))
    found = []
    for one, two, a, b, fours in looked:
        without = _contrast(table, [{f[1]: 1.0, f[0]: -1.0} for f in fours])
        together = _contrast(table, [{f[3]: 1.0, f[2]: -1.0} for f in fours])
        both = _contrast(table, [{f[3]: 1.0, f[2]: -1.0, f[1]: -1.0, f[0]: 1.0} for f in fours], level)
        found.append(
            Interaction(
                axis=axes[one], value=a, other=axes[two], other_value=b, without=without, together=together,
                contrast=both,
            )
        )  # fmt: skip
    return sorted(found, key=lambda item: -abs(math.log(item.contrast.value)) / _spread(item.contrast))


def _spread(contrast: Contrast) -> float:
    return max(1e-9, math.log(contrast.high / contrast.low))


def _known(cells: Sequence[Cell]) -> list[Cell]:
    return [cell for cell in cells if cell["pooled"] is not None and not math.isnan(cell["pooled"].se_log)]


def _table(cells: Sequence[Cell]) -> tuple[dict[Key, Cell], list[str]]:
    """Cells by their values of the axes that vary; of repeats of one setup the first."""
    axes = varying(cells)
    table: dict[Key, Cell] = {}
    for cell in _known(cells):
        table.setdefault(tuple(cell["setup"].get(axis) for axis in axes), cell)
    return table, axes


def _levels(table: Mapping[Key, Cell], place: int, axis: str) -> tuple[Hashable, list[Hashable]]:
    """The value that others are compared with (the default where it ran, else the most frequent), and the others."""
    values = [key[place] for key in table]
    default = AXES[axis].default if axis in AXES else None
    reference = default if default in values else max(dict.fromkeys(values), key=values.count)
    return reference, [value for value in dict.fromkeys(values) if value != reference]


def _swap(key: Key, place: int, value: Hashable) -> Key:
    return (*key[:place], value, *key[place + 1 :])


def _fours(
    table: Mapping[Key, Cell], axes: Sequence[str], one: int, two: int, a: Hashable, b: Hashable
) -> list[tuple[Key, Key, Key, Key]]:
    """Keys (neither, a, b, both) of matched cells."""
    first, second = _levels(table, one, axes[one])[0], _levels(table, two, axes[two])[0]
    fours = [
        (_swap(_swap(key, one, first), two, second), _swap(key, two, second), _swap(key, one, first), key)
        for key in table
        if key[one] == a and key[two] == b
    ]
    return [four for four in fours if all(key in table for key in four)]


def _contrast(table: Mapping[Key, Cell], terms: Sequence[Mapping[Key, float]], level: float = LEVEL) -> Contrast:
    """Mean of weighted sums of log speed-ups; a cell in several of them counts with the sum of its weights."""
    logs = [sum(w * math.log(table[key]["pooled"].value) for key, w in term.items()) for term in terms]
    weights: dict[Key, float] = {}
    for term in terms:
        for key, weight in term.items():
            weights[key] = weights.get(key, 0.0) + weight / len(terms)
    variance = sum((weight * table[key]["pooled"].se_log) ** 2 for key, weight in weights.items())
    df = min(table[key]["pooled"].df for key in weights)
    centre, half = sum(logs) / len(logs), t_quantile(df, level) * math.sqrt(variance)
    value, low, high, least, most = (
        math.exp(x) for x in (centre, centre - half, centre + half, min(logs), max(logs))
    )  # fmt: skip
    return Contrast(value=value, low=low, high=high, n=len(terms), least=least, most=most)
