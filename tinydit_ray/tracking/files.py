"""Which files of a sweep folder belong to a run. Needs no MLflow."""

from __future__ import annotations

import csv
import glob
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tinydit_ray.record import Record

_SAFE_ID = re.compile(r"[A-Za-z0-9_-]+")
# Too big, or of no use in a browser.
_LEFT_OUT = (".pt", ".safetensors", ".ckpt", ".tmp", ".lock")
_SUMMARY = ("sweep.json", "results.parquet", "best.yaml", "summary*", "report*", "*.csv", "*.png", "plots/*")
MAX_LOSS_POINTS = 800


def round_name(record: Mapping[str, object]) -> str:
    """Name of the folder of one round and attempt: ``r1-a1``, ``rep2-r1-a1``."""
    repeat, round_, attempt = (int(str(record.get(key) or 0)) for key in ("repeat", "round", "attempt"))
    return f"{f'rep{repeat}-' if repeat > 0 else ''}r{round_}-a{attempt}"


def files_of(sweep_dir: Path, record: Record) -> dict[str, Path]:
    """Name → path of the files of a record's round, from ``cells/*<cell_id>*/<round>/``.

    Checkpoints stay out, and so does what a link would bring in from elsewhere.
    """
    cell_id = str(record.get("cell_id") or "")
    if not _SAFE_ID.fullmatch(cell_id):
        return {}
    found: dict[str, Path] = {}
    for folder in sorted((sweep_dir / "cells").glob(f"*{glob.escape(cell_id)}*/{round_name(record)}")):
        found.update(_inside(sweep_dir, folder, "**/*"))
    return found


def summary_files(sweep_dir: Path) -> dict[str, Path]:
    """Name → path of the files that belong to the sweep as a whole: summary, results, plots, report."""
    found: dict[str, Path] = {}
    for pattern in _SUMMARY:
        found.update(_inside(sweep_dir, sweep_dir, pattern))
    return found


def _inside(top: Path, folder: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    top = top.resolve()
    for path in sorted(folder.glob(pattern)):
        kept = path.suffix not in _LEFT_OUT and path.name != "phase"  # what a round that runs is doing
        if path.is_file() and kept and path.resolve().is_relative_to(top):
            yield path.relative_to(folder).as_posix(), path


def loss_points(path: Path | None, *, most: int = MAX_LOSS_POINTS) -> list[tuple[int, float]]:
    """(step, loss) of a ``loss.csv``, at most ``most`` of them, evenly spread, first and last kept.

    The columns ``step`` and ``loss`` (else the first two) are read; what is no finite number is left out.
    """
    points: dict[int, float] = {}
    try:
        with open(path or "", newline="", encoding="utf-8") as file:
            for row in _rows(csv.reader(file)):
                points.setdefault(*row)
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
    ordered = sorted(points.items())
    if len(ordered) <= most:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]


def _rows(lines: Iterator[list[str]]) -> Iterator[tuple[int, float]]:
    at_step, at_loss = 0, 1
    for line in lines:
        if "step" in line and any("loss" in word for word in line):
            at_step = line.index("step")
            at_loss = next(i for i, word in enumerate(line) if "loss" in word)
            continue
        try:
            step, loss = int(float(line[at_step])), float(line[at_loss])
        except (IndexError, ValueError, OverflowError):
            continue
        if math.isfinite(loss):
            yield step, loss
