"""``--repeat RECORD``: the cell of an earlier record once more, and whether the two measurements agree."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tinydit_ray.bench.stats import LEVEL, Estimate, t_quantile
from tinydit_ray.bench.verdict import Floor, Pooled, pooled_speedups
from tinydit_ray.config import AXES
from tinydit_ray.grid import Grid, GridError
from tinydit_ray.record import Record, last_attempts, undisturbed

if TYPE_CHECKING:
    from tinydit_ray.sweep.driver import Sweep


def read_record(path: Path) -> Record:
    """The row of a round's ``record.json``. Raises GridError, one line."""
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GridError(f"--repeat {path}: cannot be read ({error.strerror})") from None
    except ValueError:
        row = None
    if not isinstance(row, dict) or "config.attention" not in row:
        raise GridError(f"--repeat {path}: not a record; name a record.json of a sweep's cells/CELL/rN-aM/")
    return row


def grid_of(row: Record, path: Path) -> Grid:
    """One cell: that of the record, with the control of its sweep where its folder still lies around it."""
    config = {key: row[f"config.{key}"] for key in AXES if row.get(f"config.{key}") is not None}
    return Grid(cells=[config], control=_control_of_sweep(path))


def _control_of_sweep(path: Path) -> dict[str, Any]:
    folder = path.absolute().parents
    try:
        return json.loads((folder[3] / "sweep.json").read_text(encoding="utf-8"))["grid"]["control"]
    except (OSError, ValueError, KeyError, IndexError):
        return {}


def finish_repeat(sweep: Sweep, console: Console) -> None:
    """Print then and now in one line, and whether they differ by more than chance."""
    then = sweep.options.repeated
    rows = undisturbed(last_attempts(sweep.records))
    if then is None or not rows or then.get("speedup_vs_control") is None:
        console.print("then and now cannot be compared: one of them has no timing")
        return
    if then["data_digest"] != rows[0]["data_digest"]:
        console.print(f"[yellow]other data: then {then['data_digest']}, now {rows[0]['data_digest']}")
    console.print(compare(then, rows, sweep.floor), highlight=False, soft_wrap=True)


def compare(then: Record, now: list[Record], floor: Floor) -> str:
    """``then ×1.218 [1.14, 1.30], now ×1.22 [1.18, 1.27]: they agree`` or by how much they differ.

    Both are drawn with the machine's spread between processes; the difference of the logs is judged by the
    t-interval of their joint standard error, with the smaller of the two degrees of freedom.
    """
    pooled = pooled_speedups({"then": [Estimate.from_row(then)], "now": [Estimate.from_row(row) for row in now]}, floor)
    before, after = pooled["then"], pooled["now"]
    difference = math.log(after.value / before.value)
    allowed = t_quantile(min(before.df, after.df), LEVEL) * math.hypot(before.se_log, after.se_log)
    judged = "they agree" if abs(difference) <= allowed else f"they differ by {100 * math.expm1(difference):+.1f} %"
    return f"then {_words(before)}, now {_words(after)}: {judged} (up to ±{100 * math.expm1(allowed):.1f} % is noise)"


def _words(pooled: Pooled) -> str:
    return f"×{pooled.value:.3f} [{pooled.ci_low:.3f}, {pooled.ci_high:.3f}]"
