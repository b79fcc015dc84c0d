"""How far a sweep is, in plain data: its own screen shows it, ``progress.json`` and MLflow carry it to others."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tinydit_ray.atomic import replace_text
from tinydit_ray.record import STATUSES
from tinydit_ray.sweep.kinds import by_kind

PROGRESS_FILE = "progress.json"
PROGRESS_TAG = "progress"


@dataclass(frozen=True, kw_only=True)
class Working:
    """A round that runs."""

    cell: str
    round: int
    since_s: float  # seconds that it runs, when this was written
    folder: str = ""  # of the round, inside the sweep's: the file ``phase`` there says what it does


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Rounds and seconds of this session of a sweep; ``ended`` is set when its driver came to an end."""

    total: int
    done: int
    left_s: float
    at: str  # when this was written, UTC
    working: Sequence[Working] = ()
    ended: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Progress | None:
        """None for what a driver did not write, or has not written whole."""
        try:
            found: dict[str, Any] = json.loads(text)
            known = cls(**{**found, "working": tuple(Working(**item) for item in found["working"])})
            numbers = [known.total, known.done, known.left_s, *(item.since_s for item in known.working)]
            numbers += [item.round for item in known.working]
            words = [word for item in known.working for word in (item.cell, item.folder)]
            whole = all(map(_is_number, numbers)) and all(isinstance(word, str) for word in words)
            return known if whole and known.age_s >= 0 else None
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - datetime.fromisoformat(self.at).timestamp())

    def write(self, folder: Path) -> None:
        replace_text(folder / PROGRESS_FILE, self.to_json())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def count_words(statuses: Iterable[str]) -> str:
    """``7 ok, 1 failed`` of the statuses of rounds, or of their counts."""
    found = Counter(statuses)
    return ", ".join(f"{found[word]} {word}" for word in STATUSES if found[word]) or "no round has ended"


def best_words(rows: Iterable[Mapping[str, Any]]) -> str:
    """The fastest cell so far by its pooled speed-up, with its verdict so far; one on each kind of node."""
    known = by_kind(row for row in rows if row.get("speedup_pooled"))
    return f"best so far: {'; '.join(map(_best, known.values())) or 'nothing is timed yet'}"


def _best(known: Sequence[Mapping[str, Any]]) -> str:
    best = max(known, key=lambda row: row["speedup_pooled"])
    low, high = best["speedup_pooled_ci_low"], best["speedup_pooled_ci_high"]
    interval = f" [{low:.3f}, {high:.3f}]" if None not in (low, high) else ""
    return f"{best['cell_name']} ×{best['speedup_pooled']:.3f}{interval}, {best['verdict']}"
