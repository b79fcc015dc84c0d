"""Two sweeps cell by cell: yesterday and today, two machines, two versions.

python analysis/compare.py runs/monday runs/tuesday                     a table: faster, slower, within noise, new, gone
python analysis/compare.py runs/monday runs/tuesday --fail-slower 0.05  exit 1 where a cell became 5 % slower, or broke
python analysis/compare.py 'monday' 'tuesday' --tracking-uri sqlite:///mlflow.db

Cells are matched by their settings. What differs around them (machine, versions, probe, data, threads, control) is
named, and each such difference has a table of its own. Cells on other data, with other threads or against another
control are shown side by side but not judged; --across data,threads,control judges them all the same.

By default the speed-ups over the control are compared: both were measured beside a control of their own, so a machine
that is slow today changes nothing. What made the control itself slower does not show in it; --by ms compares times.

Exit status: 0 · 1 with --fail-slower where a cell is slower by that much beyond noise, or ran before and does not
any more · 2 bad usage, and with --fail-slower where not one cell could be judged.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from analysis.load import Row, SweepData, load
from analysis.pairs import BLOCKING, Pair, Side, show
from tinydit_ray.arguments import below_one
from tinydit_ray.bench.stats import Estimate, t_quantile
from tinydit_ray.bench.verdict import Floor, Pooled, pooled_speedups, verdict
from tinydit_ray.config import AXES
from tinydit_ray.record import BAD_STATUSES, undisturbed
from tinydit_ray.sweep.errors import OK, USAGE, UsageError
from tinydit_ray.sweep.floor import load_floor
from tinydit_ray.sweep.seeds import is_seed_row

SLOWER = 1  # exit status
_SHARE = below_one("a share from 0 to below 1, such as 0.05")
_PLACES = ("cpus_per_worker", "gpus_per_worker")  # of a setup these say where it ran, not what it was
_FACTS = {
    "machine": ("node_kind",), "versions": ("product_version", "effective.python", "effective.torch"),
    "probe": ("probe_id",), "data": ("data_source", "data_digest"), "threads": ("effective.threads",),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="A", help="sweep folder, or a sweep's run or name in MLflow")
    parser.add_argument("after", metavar="B", help="the sweep to judge against it")
    parser.add_argument("--fail-slower", type=_SHARE, metavar="SHARE", help="such as 0.05: exit 1 if slower by 5 %%")
    parser.add_argument("--by", choices=("speedup", "ms"), default="speedup", help="(default: speedup)")
    parser.add_argument("--across", default="", metavar="WHAT,…", help=f"judge in spite of: {', '.join(BLOCKING)}")
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow store of sweeps that are no folder")
    options = parser.parse_args(argv)
    try:
        across = _across(options.across)
        before, after = (one_sweep(target, options.tracking_uri) for target in (options.before, options.after))
        pairs = compare(before, after, by=options.by, across=across)
        show(Console(highlight=False), before, after, pairs, options.by)
        return gate(pairs, options.fail_slower)
    except UsageError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return USAGE


def _across(text: str) -> frozenset[str]:
    words = frozenset(word.strip() for word in text.split(",") if word.strip())
    if unknown := sorted(words - set(BLOCKING)):
        raise UsageError(f"--across {unknown[0]}: not possible; possible: {', '.join(BLOCKING)}")
    return words


def one_sweep(target: str, uri: str | None) -> SweepData:
    """Raises UsageError where the target is more than one sweep."""
    found = load([target], uri)
    if len(found) != 1:
        names = ", ".join(sweep.name for sweep in found[:6]) + (", …" if len(found) > 6 else "")
        raise UsageError(f"{target}: holds {len(found)} sweeps ({names}); name one of them")
    return found[0]


# --- comparing --------------------------------------------------------------------------------------------------


def compare(
    before: SweepData, after: SweepData, *, by: str = "speedup", across: Iterable[str] = ()
) -> list[Pair]:
    """Every cell of either sweep, in the order of ``after``, then those that only ``before`` has."""
    old, new = sides(before, by), sides(after, by)
    floor = _floor(after)
    keys = [*new, *(key for key in old if key not in new)]
    return [_pair(old.get(key), new.get(key), frozenset(across), floor) for key in keys]


def sides(sweep: SweepData, by: str) -> dict[tuple[Any, ...], Side]:
    """The sweep's cells by their settings; on a cluster of several node kinds each kind has cells of its own."""
    times = "sample_ms_per_image" if any(row["config.sampler"] != "eager" for row in sweep.rows) else "ms_per_step"
    many_kinds = len({row["node_kind"] for row in sweep.rows}) > 1
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in (row for row in sweep.rows if not is_seed_row(row)):
        cells.setdefault((times, row["node_kind"] if many_kinds else "", *_setup(row)), []).append(row)
    names = {key: str(place) for place, key in enumerate(cells)}
    estimates = {
        names[key]: [estimate for row in undisturbed(rows) if (estimate := _estimate(row, by, times))]
        for key, rows in cells.items()
    }  # fmt: skip
    pooled = pooled_speedups(estimates, _floor(sweep))
    return {key: _side(rows, pooled.get(names[key]), sweep, times) for key, rows in cells.items()}


def _setup(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Axis values without where it ran; what an older row lacks was at its default."""
    values = ((name, row.get(f"config.{name}")) for name in AXES if name not in _PLACES)
    return (*(AXES[name].default if value is None else value for name, value in values), row["repeat"] or 0)


def _floor(sweep: SweepData) -> Floor:
    floor, _ = load_floor(str(sweep.content.get("node_kind") or ""))
    return floor


def _estimate(row: Row, by: str, times: str) -> Estimate | None:
    """The row's speed with its spread inside the process; None where it has none."""
    if row["status"] != "ok" or not row["speedup_vs_control" if by == "speedup" else times]:
        return None
    steps = row["timed_steps"] or 0
    if by == "speedup":
        return Estimate.from_row(row)
    value = 1e3 / row[times]
    if steps < 4 or row["ms_per_step_iqr"] is None:
        return Estimate(value, math.nan, math.nan, steps // 2)
    # the standard error of a median of n normal times is 1.25 sd / √n, and their sd is iqr / 1.35
    error = 1.2533 * row["ms_per_step_iqr"] / 1.349 / row["ms_per_step"] / math.sqrt(steps)
    half = math.exp(error * t_quantile(steps // 2 - 1))
    return Estimate(value, value / half, value * half, steps // 2)


def _side(rows: Sequence[Row], pooled: Pooled | None, sweep: SweepData, times: str) -> Side:
    good = [row for row in rows if row["status"] == "ok"]
    bad = next((row for row in rows if row["status"] in BAD_STATUSES), None)
    worst = bad or (good or rows)[0]
    sampled = [row[times] for row in good if row[times]] if times == "sample_ms_per_image" else []

    def first(name: str) -> Any:
        return next((row[name] for row in good if row[name] is not None), None)

    facts = {word: _fact(good or rows, columns) for word, columns in _FACTS.items()}
    facts["control"] = _words((sweep.content.get("grid") or {}).get("control") or {})
    return Side(
        name=rows[0]["cell_name"] or rows[0]["cell_id"] or "?", status=worst["status"] or "?",
        reason=worst["reason"] or "", facts=facts, pooled=None if bad else pooled,
        ms=statistics.median(sampled) if sampled else first("ms_per_step_pooled"),
        mse=first("velocity_mse"), fd=first("probe_fd"),
    )  # fmt: skip


def _fact(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The values of the columns, "" where none is known; several where rounds differ (a sweep gone on with later)."""
    found = dict.fromkeys(
        " ".join(f"{column.rpartition('.')[2]} {row[column]}" for column in columns if row[column] is not None)
        for row in rows
    )
    return " and ".join(word for word in found if word)


def _words(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(values.items())) or "plain fp32"


def _pair(before: Side | None, after: Side | None, across: frozenset[str], floor: Floor) -> Pair:
    if before is None or after is None:
        word = "new" if before is None else "gone"
        return Pair(before=before, after=after, differs=(), change=None, word=word)
    differs = tuple(
        word for word in before.facts
        if before.facts[word] != after.facts[word] and (word != "probe" or (before.facts[word] and after.facts[word]))
    )  # fmt: skip
    if before.pooled is None or after.pooled is None:
        ran, runs = before.status == "ok", after.status == "ok"
        broke = ran and after.status in BAD_STATUSES
        word = "broken" if broke else "mended" if runs and not ran else "not judged"
        return Pair(before=before, after=after, differs=differs, change=None, word=word)
    change = _ratio(before.pooled, after.pooled)
    judged = not (set(differs) & set(BLOCKING)) - across
    return Pair(
        before=before, after=after, differs=differs, change=change,
        word=verdict(change, floor) if judged else "not judged",
    )  # fmt: skip


def _ratio(before: Pooled, after: Pooled) -> Pooled:
    """After ÷ before of two independent estimates: standard errors add in squares, degrees of freedom after
    Welch (1947, Biometrika 34) and Satterthwaite."""
    parts = [(side.se_log**2, side.df) for side in (before, after)]
    variance = sum(square for square, _ in parts)
    spread = sum(square**2 / df for square, df in parts if df > 0)
    if not math.isfinite(variance) or any(df <= 0 for _, df in parts):
        se, df, half = math.nan, 0.0, math.nan
    else:
        se, df = math.sqrt(variance), variance**2 / spread if spread else min(df for _, df in parts)
        half = t_quantile(df) * se
    centre = math.log(after.value / before.value)
    value, low, high = (math.exp(x) for x in (centre, centre - half, centre + half))
    return Pooled(value=value, ci_low=low, ci_high=high, se_log=se, df=df, rounds=min(before.rounds, after.rounds))


def gate(pairs: Sequence[Pair], share: float | None) -> int:
    """Exit status under ``--fail-slower``. Raises UsageError where nothing could be judged: a gate that cannot
    see must not be open."""
    if share is None:
        return OK
    judged = [pair for pair in pairs if pair.word not in ("new", "gone", "mended", "not judged")]
    if not judged:
        raise UsageError(f"--fail-slower {share:g}: not one cell of A and B could be judged")
    slow = [p for p in judged if p.word == "slower" and p.change and 1 / p.change.value - 1 >= share]
    for pair in slow:
        assert pair.change
        print(f"slower by {100 * (1 / pair.change.value - 1):.1f} %: {pair.name}", file=sys.stderr)
    broken = [pair for pair in judged if pair.word == "broken"]
    for pair in broken:
        print(f"broken: {pair.name} ({pair.after.status if pair.after else ''})", file=sys.stderr)
    return SLOWER if slow or broken else OK


if __name__ == "__main__":
    sys.exit(main())
