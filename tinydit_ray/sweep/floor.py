"""The machine's noise floor: measured by a null sweep, kept per node kind, used by later sweeps' verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tinydit_ray.atomic import replace_text
from tinydit_ray.bench.stats import abba_ratios
from tinydit_ray.bench.verdict import Floor
from tinydit_ray.data import cache_folder


def floor_path(node_kind: str) -> Path:
    return cache_folder() / "floors" / f"{node_kind}.json"


def save_floor(node_kind: str, floor: Floor, sweep: str) -> Path:
    path = floor_path(node_kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**asdict(floor), "sweep": sweep}
    replace_text(path, json.dumps({k: None if v != v else v for k, v in content.items()}, indent=2) + "\n")
    return path


def load_floor(node_kind: str) -> tuple[Floor, str]:
    """The floor of a node kind and where it comes from; the stated default where none was measured."""
    path = floor_path(node_kind)
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        source = content.pop("sweep")
        values: dict[str, Any] = {k: float("nan") if v is None else v for k, v in content.items()}
        return Floor(**values), f"measured by the null sweep {source}"
    except (OSError, ValueError, TypeError, KeyError):
        floor = Floor()
        return (
            floor,
            f"not measured on this machine, {100 * floor.process_sd:.1f} % taken (python sweeps/null_check.py)",
        )


def ratios_of(folders: Iterable[Path]) -> list[np.ndarray]:
    """Quad ratios of each round's raw step times (``steps.json``), one series per process."""
    series = []
    for folder in folders:
        try:
            steps = json.loads((folder / "steps.json").read_text())
        except (OSError, ValueError):
            continue
        ratios = abba_ratios(steps["cell_ms"], steps["control_ms"])
        if len(ratios):
            series.append(ratios)
    return series
