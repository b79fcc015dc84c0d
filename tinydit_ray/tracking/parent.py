"""What the sweep's own run holds, and the pooled numbers. Needs no MLflow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinydit_ray.bench.seeds import WORSE
from tinydit_ray.record import POOLED, STATUSES
from tinydit_ray.tracking.split import clean, flatten, rounded
from tinydit_ray.tracking.uri import mask_text

if TYPE_CHECKING:
    import pandas as pd

_PARAM_LENGTH = 500
_NOTE_LENGTH = 5000
Pooled = Mapping[str, tuple[dict[str, float], dict[str, str]]]  # cell_id -> (metrics, tags)


def sweep_params(sweep: Mapping[str, Any]) -> dict[str, str]:
    """The grid as params: ``axes.attention = manual, sdpa``."""
    return clean(flatten(sweep.get("grid") or {}), _PARAM_LENGTH)


def sweep_tags(sweep: Mapping[str, Any]) -> dict[str, str]:
    """Who, where and with what: version, commit, machine, library versions, command (passwords masked)."""
    facts = {name: sweep.get(name) for name in ("created_at", "product_version", "git_commit")}
    command = [mask_text(str(word)) for word in sweep.get("command") or []]
    for key, prefix in (("machine", "machine."), ("versions", "versions."), ("data", "data_")):
        facts.update(flatten(sweep.get(key) or {}, prefix))
    facts["command"] = " ".join(command)
    return clean({name: value for name, value in facts.items() if value not in (None, "")})


def source_tags(sweep: Mapping[str, Any]) -> dict[str, str]:
    """What the UI's columns Source and Version show."""
    command = [str(word) for word in sweep.get("command") or []]
    script = next((word for word in command if word.endswith(".py")), command[0] if command else "")
    tags = {
        "mlflow.source.name": Path(script).name,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": sweep.get("git_commit"),
    }
    return clean({name: value for name, value in tags.items() if value})


def pooled_of(pooled: pd.DataFrame | None) -> Pooled:
    """The pooled numbers of each cell. Takes one row per cell, or one per cell and round."""
    if pooled is None or "cell_id" not in pooled:
        return {}
    rows = pooled.drop_duplicates("cell_id").to_dict("records")
    return {str(row["cell_id"]): _pooled_row(row) for row in rows}


def _pooled_row(row: Mapping[Any, Any]) -> tuple[dict[str, float], dict[str, str]]:
    names = [name for name in row if name in POOLED]
    words = {name: row[name] for name in names if isinstance(row[name], str) and row[name]}
    return {name: rounded(row[name]) for name in names if _is_number(row[name])}, clean(words)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def outcome(pooled: Pooled, names: Mapping[str, str]) -> tuple[dict[str, float], dict[str, str]]:
    """The sweep's result in a number and a name. Only a cell whose verdict is "faster", and whose quality is not
    worse, can be the fastest."""
    faster = [
        (numbers["speedup_pooled"], cell_id)
        for cell_id, (numbers, words) in pooled.items()
        if words.get("verdict", "").startswith("faster") and "speedup_pooled" in numbers
        and words.get("quality_verdict") != WORSE
    ]
    if not faster:
        timed = any("speedup_pooled" in numbers for numbers, _ in pooled.values())
        worse = any(words.get("quality_verdict") == WORSE for _, words in pooled.values())
        verdict = "none is faster than the control" + (" at no worse quality" if worse else "")
        return {}, {"verdict": verdict} if timed else {}
    speedup, cell_id = max(faster)
    name = names.get(cell_id, cell_id)
    words = {"best_cell": name, "best_cell_id": cell_id, "verdict": f"{speedup:.2f}× with {name}"}
    return {"best_speedup_pooled": speedup}, clean(words)


def counts(statuses: Mapping[str, str]) -> dict[str, int]:
    """How many rounds ended in each status, by their last attempt. Takes record key → status."""
    latest: dict[str, tuple[int, str]] = {}
    for key, status in statuses.items():
        round_, _, attempt = key.rpartition("/")
        number = int(attempt) if attempt.isdigit() else 0
        latest[round_] = max(latest.get(round_, (-1, "")), (number, status))
    ended = [status for _, status in latest.values()]
    return {word: ended.count(word) for word in STATUSES if word in ended}


def note(summary: Mapping[str, Path]) -> str:
    """The summary's Markdown, as the description of the sweep's run. MLflow shows its first lines: one table goes
    before all else."""
    for name, path in summary.items():
        if name.endswith(".md") and path.is_file():
            parts = path.read_text("utf-8", errors="replace").split("\n\n")
            tables = [part for part in parts if part.startswith("|")]
            if len(tables) == 1:
                parts = [*tables, *(part for part in parts if part not in tables)]
            text = "\n\n".join(parts)
            return mask_text(text if len(text) <= _NOTE_LENGTH else text[:_NOTE_LENGTH] + "…")
    return ""
