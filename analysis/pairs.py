"""Cells of two sweeps beside each other, and how that is shown in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from analysis.load import SweepData
from tinydit_ray.bench.verdict import Pooled
from tinydit_ray.sweep.table import Column, print_columns

BLOCKING = ("data", "threads", "control")  # what makes a speed another question
STYLES = {"faster": "green", "slower": "red", "broken": "red", "new": "cyan", "gone": "yellow", "too noisy": "yellow"}


@dataclass(frozen=True, kw_only=True)
class Side:
    """A cell in one of the two sweeps."""

    name: str
    status: str
    reason: str
    facts: dict[str, str]  # what was around it, in words
    pooled: Pooled | None  # of the speed, above 1 is faster than the control (or than 1 step/s)
    ms: float | None
    mse: float | None
    fd: float | None


@dataclass(frozen=True, kw_only=True)
class Pair:
    before: Side | None
    after: Side | None
    differs: tuple[str, ...]
    change: Pooled | None  # speed after ÷ before; above 1 is faster
    word: str  # faster, slower, within noise, too noisy, new, gone, broken, mended, not judged

    @property
    def name(self) -> str:
        side = self.after or self.before
        return side.name if side else ""


def show(console: Console, before: SweepData, after: SweepData, pairs: Sequence[Pair], by: str) -> None:
    """A table for each set of differences, the one without any first; then what they add up to."""
    console.print(f"A  {before.name}  ({before.origin})\nB  {after.name}  ({after.origin})", soft_wrap=True)
    what = "speed-up over the control" if by == "speedup" else "steps per second"
    console.print(f"change = {what} of B ÷ that of A, above 1 is faster; 95 % interval over rounds")
    matched = [pair for pair in pairs if pair.before and pair.after]
    for differs in sorted({pair.differs for pair in matched}, key=lambda words: (len(words), words)):
        group = [pair for pair in matched if pair.differs == differs]
        console.print()
        for line in _differences(group, differs):
            console.print(line, soft_wrap=True)
        _print(console, group, probe="probe" not in differs and "data" not in differs)
    for word, place in (("new", "B"), ("gone", "A")):
        names = [pair.name for pair in pairs if pair.word == word]
        if names:
            console.print(f"{word}, only in {place}: {', '.join(names)}", style=STYLES[word], soft_wrap=True)
    words = [pair.word for pair in pairs]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    console.print(f"\n{counts or 'neither sweep has a cell'}", style="bold")


def _differences(group: Sequence[Pair], differs: Sequence[str]) -> list[str]:
    """``threads: 2 → 4``, and what that means."""
    lines = []
    for word in differs:
        seen = dict.fromkeys(
            f"{pair.before.facts[word] or 'unknown'} → {pair.after.facts[word] or 'unknown'}"
            for pair in group if pair.before and pair.after
        )  # fmt: skip
        lines.append(f"{word} differ{'s' if word in ('machine', 'probe', 'control') else ''}: {'; '.join(seen)}")
    stops = [word for word in differs if word in BLOCKING]
    if stops and all(pair.word not in ("faster", "slower", "within noise", "too noisy") for pair in group):
        lines.append(f"not judged (--across {','.join(stops)} does)")
    return lines


def _print(console: Console, group: Sequence[Pair], *, probe: bool) -> None:
    """The columns that fit the console; the scores go first, the change and its verdict never."""
    sides = [(pair.before, pair.after) for pair in group if pair.before and pair.after]
    fds = [(a.fd, b.fd) for a, b in sides]
    columns = [
        Column("setup", [Text(pair.name) for pair in group], right=False, wraps=True),
        Column("ms A → B", _both([(a.ms, b.ms) for a, b in sides], ".1f"), rank=1),
        Column("change", [Text(_number(pair.change.value if pair.change else None, ".3f")) for pair in group]),
        Column("95 % interval", [_interval(pair.change) for pair in group]),
        Column("verdict", [_verdict(pair) for pair in group], right=False, wraps=True),
        Column("velocity MSE A → B", _both([(a.mse, b.mse) for a, b in sides], ".4f"), rank=2),
        Column("probe-FD A → B", _both(fds, ".1f") if probe else [Text("other probe")] * len(fds), rank=3),
    ]
    print_columns(console, None, columns, elsewhere="a wider terminal shows them")


def _both(values: Sequence[tuple[float | None, float | None]], form: str) -> list[Text]:
    return [Text(f"{_number(a, form)} → {_number(b, form)}", "dim" if a is b is None else "") for a, b in values]


def _interval(change: Pooled | None) -> Text:
    return Text(f"{change.ci_low:.3f} – {change.ci_high:.3f}") if change and change.df > 0 else Text("–", "dim")


def _verdict(pair: Pair) -> Text:
    why = f" ({pair.after.status}: {pair.after.reason})" if pair.word == "broken" and pair.after else ""
    return Text(pair.word, STYLES.get(pair.word, "dim")).append(why, "default")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
