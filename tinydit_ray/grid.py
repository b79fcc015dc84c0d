"""Grid files: which cells a sweep measures. YAML with ``base axes cells exclude control rounds steps budget``."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tinydit_ray.config import (
    AUTOCAST,
    AXES,
    COMPILE_ONLY,
    SIZE_AXES,
    CellConfig,
    Scalar,
    check_key,
    check_value,
    coerce,
    from_mapping,
    nearest,
    preset_size,
)
from tinydit_ray.errors import OneLineError

KEYS = ("base", "axes", "cells", "exclude", "control", "rounds", "steps", "budget", "placement")
PLACEMENTS = ("one-kind", "every-node-kind")  # of each cell, on a cluster whose nodes differ
MANY_CELLS = 10_000  # more than this is asked about first


class GridError(OneLineError):
    """A grid that a person has to mend; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A grid as written: ``axes`` are multiplied, ``cells`` taken as they are, both over ``base``."""

    base: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    cells: Sequence[Mapping[str, Any]] = ()
    exclude: Sequence[Mapping[str, Any]] = ()
    control: Mapping[str, Any] = field(default_factory=dict)
    rounds: int | None = None
    steps: int | None = None
    budget_s: float | None = None
    placement: str | None = None

    @property
    def count(self) -> int:
        """How many cells it names, before exclusions and duplicates."""
        return (math.prod(map(len, self.axes.values())) if self.axes else 0) + len(self.cells)

    def count_with(self, sets: Mapping[str, Sequence[Any]]) -> int:
        """How many cells it names with ``--set``, before exclusions and duplicates."""
        return max(self.count, 1) * math.prod(map(len, sets.values()))

    def resolve(self, defaults: Mapping[str, Any], sets: Mapping[str, Sequence[Any]]) -> tuple[list[CellConfig], int]:
        """All cells, in order, and how many duplicates were removed.

        ``defaults`` lie under the grid's base; ``sets`` (``--set``) multiply what the grid gives and win over it.
        Raises GridError naming the setting.
        """
        points = list(self._points()) or [{}]
        products = [dict(zip(sets, values, strict=True)) for values in itertools.product(*sets.values())]
        cells = [self._cell(defaults, point, extra) for point in points for extra in products]
        kept = [cell for cell in cells if not any(_matches(cell, pattern) for pattern in self.exclude)]
        unique = list({cell.config_id: cell for cell in kept}.values())
        if not unique:
            raise GridError("the grid is empty: every cell is excluded")
        return unique, len(kept) - len(unique)

    def _points(self) -> Iterable[dict[str, Any]]:
        if self.axes:
            for values in itertools.product(*self.axes.values()):
                yield dict(zip(self.axes, values, strict=True))
        yield from map(dict, self.cells)

    def _cell(self, defaults: Mapping[str, Any], point: Mapping[str, Any], extra: Mapping[str, Any]) -> CellConfig:
        values: dict[str, Any] = {}
        for layer in (defaults, self.base, point, extra):
            if "model" in layer:  # a preset replaces the size that a layer below it gave
                values = {key: value for key, value in values.items() if key not in SIZE_AXES}
            values.update(layer)
        if values.get("compile") == "off" and ("compile" in self.axes or "compile" in extra):
            # one of a product: without a compiler its switches are no axes, and the duplicates fall together
            values = {key: value for key, value in values.items() if key not in COMPILE_ONLY}
        if values.get("precision", "fp32") not in AUTOCAST and ("precision" in self.axes or "precision" in extra):
            values = {key: value for key, value in values.items() if key != "residual"}
        try:
            return from_mapping(values)
        except ValueError as error:
            raise GridError(str(error)) from None


def _matches(cell: CellConfig, pattern: Mapping[str, Any]) -> bool:
    columns = cell.columns()
    if "model" in pattern:  # a size may be written in two ways
        size = dict(zip(SIZE_AXES, preset_size(pattern["model"]), strict=True))
        pattern = {**{key: value for key, value in pattern.items() if key != "model"}, **size}
    return all(columns[f"config.{key}"] == value for key, value in pattern.items())


def varying_axes(cells: Sequence[CellConfig]) -> list[str]:
    """Axes with more than one value, sizes as ``model``, in the order of the config."""
    rows = [cell.asdict() for cell in cells]
    axes = [name for name in rows[0] if len({row[name] for row in rows}) > 1]
    if set(SIZE_AXES) & set(axes):
        axes = ["model", *(name for name in axes if name not in SIZE_AXES)]
    first = [name for name in ("attention", "precision") if name in axes]
    return first + [name for name in axes if name not in first]


class _GridLoader(yaml.SafeLoader):
    """YAML 1.2's idea of plain words: ``off``, ``no`` and ``on`` are words, ``1e-4`` is a number; a key given
    twice is an error."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in rules if not tag.endswith((":bool", ":float", ":int", ":timestamp"))]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise GridError(f"line {node.start_mark.line + 1}: the key {key!r} is given twice")
        return super().construct_mapping(node, deep)


def _decimal(loader: yaml.SafeLoader, node: Any) -> int:
    """Whole numbers are decimal: 010 is ten, as it looks."""
    return int(loader.construct_scalar(node), 10)


_GridLoader.add_constructor("tag:yaml.org,2002:int", _decimal)
_GridLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))
_GridLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_GridLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def parse_grid(text: str, name: str = "grid") -> Grid:
    """A grid from YAML text; every mistake is a GridError in one line that names it."""
    try:
        content = yaml.load(text, Loader=_GridLoader)
    except yaml.YAMLError as error:
        raise GridError(f"{name}: not YAML: {' '.join(str(error).split())}") from None
    except GridError as error:
        raise GridError(f"{name}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # a wrong tag, thousands of digits or brackets: PyYAML's constructors raise what Python raises
        reason = " ".join(str(error).split())[:200]
        raise GridError(f"{name}: a value cannot be read ({type(error).__name__}: {reason})") from None
    try:
        return _grid(content)
    except ValueError as error:
        raise GridError(f"{name}: {error}") from None


def load_grid(path: Path) -> Grid:
    try:
        return parse_grid(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise GridError(f"--grid {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _grid(content: Any) -> Grid:
    if not isinstance(content, dict):
        raise ValueError(f"a map with some of {', '.join(KEYS)} is needed")
    for key in content:
        if key not in KEYS:
            raise ValueError(f"unknown key {key!r}{nearest(str(key), KEYS)}; known: {', '.join(KEYS)}")
    grid = Grid(
        base=_axis_map(content.get("base"), "base"),
        axes={key: _values(key, values) for key, values in _map(content.get("axes"), "axes").items()},
        cells=[_axis_map(cell, "cells") for cell in _list(content.get("cells"), "cells")],
        exclude=[_axis_map(cell, "exclude") for cell in _list(content.get("exclude"), "exclude")],
        control=_axis_map(content.get("control"), "control"),
        rounds=_count(content.get("rounds"), "rounds", 1),
        steps=_count(content.get("steps"), "steps", 0),
        budget_s=_budget(content.get("budget")),
        placement=_placement(content.get("placement")),
    )
    if not grid.count:
        raise ValueError("the grid is empty: give axes or cells")
    return grid


def _values(key: str, values: Any) -> list[Any]:
    check_key(key)
    if not isinstance(values, list):
        raise ValueError(f"axes: {key}: a list of values is needed, not {values!r}")
    if not values:
        raise ValueError(f"axes: {key}: the list is empty")
    return [_typed(key, value) for value in values]


def _axis_map(content: Any, where: str) -> dict[str, Any]:
    result = {}
    for key, value in _map(content, where).items():
        check_key(key)
        result[key] = _typed(key, value)
    return result


def _typed(key: str, value: Any) -> Scalar:
    """The value with its axis's type, and possible for it."""
    if key != "model":
        typed = coerce(key, value)
        check_value(AXES[key], typed)
        return typed
    preset_size(value)
    return str(value)


def _map(content: Any, where: str) -> dict[str, Any]:
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{where}: a map of axis: value is needed, not {content!r}")
    return content


def _list(content: Any, where: str) -> list[Any]:
    if content is None:
        return []
    if not isinstance(content, list):
        raise ValueError(f"{where}: a list is needed, not {content!r}")
    return content


def _count(value: Any, where: str, low: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{where}: {value!r} is not a whole number of at least {low}")
    return value


def _placement(value: Any) -> str | None:
    if value is not None and value not in PLACEMENTS:
        raise ValueError(f"placement: {value!r} is not possible; possible: {', '.join(PLACEMENTS)}")
    return value


def _budget(value: Any) -> float | None:
    if value is None:
        return None
    seconds = parse_duration(str(value))
    if seconds is None:
        raise ValueError(f"budget: {value!r} is not a duration such as 90s, 10m or 2h")
    return seconds


def parse_duration(text: str) -> float | None:
    """``90``, ``90s``, ``10m``, ``2h`` in seconds; None for anything else, and for nothing at all."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh]?)", text)
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    return seconds if 0 < seconds < math.inf else None


def parse_sets(texts: Iterable[str]) -> dict[str, list[Any]]:
    """``axis=v1,v2`` options as axis -> values. Raises GridError."""
    sets: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        words = [word.strip() for word in values.split(",") if word.strip()]
        if not equals or not words:
            raise GridError(f"--set {text}: written as axis=value or axis=value1,value2")
        if key in sets:
            raise GridError(f"--set {text}: {key} is given twice")
        try:
            check_key(key)
            sets[key] = [_typed(key, word) for word in words]
        except ValueError as error:
            raise GridError(f"--set {text}: {error}") from None
    return sets
