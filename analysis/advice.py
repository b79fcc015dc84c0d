"""What to use, what it gains, how sure that is and what it costs: in sentences, for every way a sweep can end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from analysis.cells import Cell, break_even_steps
from tinydit_ray.bench.seeds import WORSE

MOST_NAMES = 5


def advice(cells: Sequence[Cell]) -> dict[str, Any]:
    """The setup to use: the fastest whose verdict is "faster" and whose quality is not worse; ``lines`` are the
    sentences, each with what it answers."""
    proven = [cell for cell in cells if cell["verdict"] == "faster" and cell["speedup"]]
    faster = [cell for cell in proven if cell["quality"] != WORSE]
    worse = [cell for cell in proven if cell["quality"] == WORSE]
    measured = [cell for cell in cells if cell["speedup"]]
    best = max(faster, key=lambda cell: cell["speedup"]) if faster else None
    lines = _winner(best, faster) if best else _keep(measured, worse) if measured else _nothing(cells)
    if worse:
        lines.append(("Faster, but worse in quality", "; ".join(_worse(cell) for cell in worse) + "."))
    if unclear := [cell for cell in measured if cell["verdict"] == "too noisy" and (cell["high"] or 0) > 1]:
        lines.append(("Left open", f"too noisy to be judged: {_names(unclear)}. More --rounds or --time decide."))
    return {"best": best, "lines": lines}


def _winner(best: Cell, faster: Sequence[Cell]) -> list[tuple[str, str]]:
    rivals = [
        cell for cell in faster
        if cell is not best and None not in (cell["high"], best["low"]) and cell["high"] >= best["low"]
    ]  # fmt: skip
    sure = f"{_rounds(best)}, verdict “{best['verdict']}”."
    if rivals:
        sure += (
            f" Its interval overlaps with {_names(rivals)}: these were not told apart, so what is cheaper to start or"
            " better in quality may decide."
        )
    return [
        (f"Use {best['name']}.", f"It is {best['speedup']:.2f} times as fast as its control ({_interval(best)})."),
        ("How sure", sure),
        ("What it costs", f"{_start(best)}; {break_even(best)}. {_quality(best)}"),
    ]


def _keep(measured: Sequence[Cell], worse: Sequence[Cell]) -> list[tuple[str, str]]:
    """Nothing is proven faster. What the intervals leave open says how much might have been missed."""
    known = [cell for cell in measured if cell["high"] is not None and cell not in worse]
    most = max(known, key=lambda cell: cell["high"], default=None)
    what = "No setup was found faster than it, beyond noise" + (", at no worse quality." if worse else ".")
    if len(measured) == 1:
        cell = measured[0]
        what = (
            f"One setup alone was measured, {cell['name']}: {cell['speedup']:.2f} times as fast as its control"
            f" ({_interval(cell)}), verdict “{cell['verdict'] or 'none'}”."
        )
    lines = [("Keep the control.", what)]
    if most and most["high"] > 1:
        left = 100 * (most["high"] - 1)
        lines.append(
            ("How sure", f"The intervals leave open a gain of at most {left:.0f} % ({most['name']}, {_rounds(most)}).")
        )
    elif most:
        lines.append(("How sure", "Every interval lies below 1: the control is the fastest here."))
    lines.append(("What it costs", "Nothing is compiled, and quality stays the control's own."))
    return lines


def _nothing(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    if not cells:
        return [("No advice:", "the sweep has no records yet.")]
    states = Counter(str(row["status"]) for cell in cells for row in cell["rows"])
    counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    if set(states) == {"ok"}:
        return [("No advice:", "no setup here has a speed-up; its rounds were not timed against a control.")]
    reasons = Counter(
        " ".join(str(row["reason"]).split()) for cell in cells for row in cell["rows"]
        if row["status"] not in ("ok", "skipped") and row["reason"]
    )  # fmt: skip
    lines = [("No advice:", f"no setup here has a speed-up. Rounds: {counts}.")]
    if reasons:
        reason, count = reasons.most_common(1)[0]
        lines.append(("Most frequent reason", f"{reason[:300]} ({count} ×)."))
    return lines


def break_even(cell: Cell) -> str:
    """When compiling is paid for, in words, from the pooled speed-up and both ends of its interval."""
    if not cell["compile"] or cell["setup"].get("compile") == "off":
        return "nothing is compiled"
    low, middle, high = (break_even_steps(cell, cell[key]) for key in ("high", "speedup", "low"))
    if middle is None:
        return "never pays: not faster"
    if low is None or high is None:
        return f"pays after about {middle:,.0f} steps, if it is faster at all"
    return f"pays after {middle:,.0f} steps ({low:,.0f} to {high:,.0f})"


def _worse(cell: Cell) -> str:
    scores = ", ".join(
        f"{words} {cell[key]:.{digits}f}" for key, words, digits in (("mse", "velocity MSE", 4), ("fd", "probe-FD", 1))
        if cell[key] is not None
    )  # fmt: skip
    return f"{cell['name']} ({cell['speedup']:.2f} times as fast{'; ' + scores if scores else ''})"


def _quality(cell: Cell) -> str:
    if cell["mse"] is None and cell["fd"] is None:
        return "Quality was not scored in this sweep."
    mse = "–" if cell["mse"] is None else f"{cell['mse']:.4f}"
    fd = "–" if cell["fd"] is None else f"{cell['fd']:.1f}" + (f" (n = {cell['fd_n']})" if cell["fd_n"] else "")
    judged = cell["quality"] or "not judged"
    against = "not judged against other seeds of the control (--seeds 3 does)"
    if judged != "not judged":
        against = f"against other seeds of the control: {judged}"
    return f"Quality: velocity MSE {mse}, probe-FD {fd}; {against}."


def _start(cell: Cell) -> str:
    if cell["first_step"] is None:
        return "first step not timed"
    compiled = cell["compile"] and cell["setup"].get("compile") != "off"
    return f"first step {cell['first_step']:.1f} s" + (f", of it compiling {cell['compile']:.1f} s" if compiled else "")


def _interval(cell: Cell) -> str:
    if cell["low"] is None or cell["high"] is None:
        return "no interval is known"
    return f"95 % interval {cell['low']:.2f} to {cell['high']:.2f}"


def _rounds(cell: Cell) -> str:
    return f"{cell['rounds']} round{'' if cell['rounds'] == 1 else 's'}"


def _names(cells: Sequence[Cell]) -> str:
    words = [f"{cell['name']} ({cell['speedup']:.2f})" for cell in cells]
    return ", ".join(words[:MOST_NAMES]) + (f" and {len(words) - MOST_NAMES} more" if len(words) > MOST_NAMES else "")
