"""Figures of the report: inline SVG in the colours of the page, or files of their own. No window system is needed."""

from __future__ import annotations

import io
import itertools
import re
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from analysis.cells import Cell
from analysis.effects import Effect
from analysis.load import Curve
from tinydit_ray.bench.tradeoff import SAME, SAME_MSE, pareto_front

_INK = "#123457"  # stands for the page's text colour; dark on white in files
WIDTH = 5.6  # inches: on a phone the whole figure is in view, and its text still 9 pixels high
_WRAP = 36  # characters of a label's line
_BLUE, _ORANGE = "#4c8eda", "#e07b39"
_GREY = "#8a8f98"
_VERDICT = {"faster": "#2e9e5b", "slower": "#d0493f", "too noisy": "#d6a021"}
_STYLE: dict[Any, Any] = {
    "text.color": _INK, "axes.edgecolor": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "text.parse_math": False, "legend.framealpha": 0.0, "axes.spines.top": False, "axes.spines.right": False,
    "font.size": 10,
}  # fmt: skip


def svg_of(figure: Figure, salt: str) -> str:
    """The ``<svg>`` element alone; ``salt`` keeps the ids of several figures in one page apart."""
    buffer = io.StringIO()
    with rc_context({**_STYLE, "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return text.replace(_INK, "currentColor")


def save(figure: Figure, path: Path) -> None:
    """As ``.svg`` or ``.png``, on white."""
    with rc_context({**_STYLE, "svg.hashsalt": path.stem}):
        figure.savefig(path, facecolor="white", bbox_inches="tight", dpi=150, metadata={"Date": None}
                       if path.suffix == ".svg" else None)  # fmt: skip


@contextmanager
def _drawing(height: float) -> Iterator[tuple[Figure, Axes]]:
    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, figure.add_subplot()


def _label(cell: Cell) -> str:
    return f"{cell['number']}  {cell['name']}"


def _wrapped(label: str) -> str:
    """At most two lines."""
    return textwrap.fill(label, _WRAP, max_lines=2, placeholder=" …", break_on_hyphens=False)


@contextmanager
def _rows(labels: Sequence[str], words: str) -> Iterator[Axes]:
    """Axes with a row per label, the first on top, and a legend below if anything is named."""
    texts = ["\n".join(_wrapped(line) for line in label.split("\n")) for label in labels]
    inches = [0.34 + 0.17 * text.count("\n") for text in texts]
    with _drawing(1.1 + max(inches, default=0.0) * len(labels)) as (figure, axes):
        yield axes
        axes.set_yticks(range(len(labels)), texts)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlabel(textwrap.fill(words, 60))
        _legend(figure, axes)


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the axes, where it takes nothing from their width."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        long = max(map(len, labels)) > _WRAP
        figure.legend(handles, [textwrap.shorten(text, 64, placeholder=" …") for text in labels],
                      loc="outside lower left", ncols=1 if long else 2, fontsize=9)  # fmt: skip


def speedups(cells: Sequence[Cell]) -> Figure | None:
    """A point and its interval per cell, beside the line of the control, in the colour of its verdict."""
    known = [cell for cell in cells if cell["speedup"] is not None]
    if not known:
        return None
    words = "times as fast as the control in the same process, 95\N{NO-BREAK SPACE}% interval over rounds"
    with _rows([_label(cell) for cell in known], words) as axes:
        labelled: set[str] = set()
        for place, cell in enumerate(known):
            verdict = cell["verdict"] or "no verdict"
            colour = _VERDICT.get(verdict, _GREY)
            ends = (cell["low"], cell["high"]) if None not in (cell["low"], cell["high"]) else (cell["speedup"],) * 2
            axes.plot(ends, [place, place], color=colour, linewidth=4.0, solid_capstyle="butt", alpha=0.6)
            axes.plot([cell["speedup"]], [place], "o", color=colour, markersize=6,
                      label=None if verdict in labelled else verdict)  # fmt: skip
            labelled.add(verdict)
            axes.annotate(f"{cell['speedup']:.3f}", (max(ends), place), xytext=(4, 0),
                          textcoords="offset points", va="center")  # fmt: skip
        axes.axvline(1.0, color=_INK, linewidth=0.8, linestyle="--", zorder=0)
        axes.margins(x=0.15)
    return axes.get_figure(root=True)


def bars(cells: Sequence[Cell], *, value: str, words: str, note: Callable[[Cell], str] | None = None) -> Figure | None:
    """One horizontal bar per cell that has the value; ``note`` stands below its name."""
    known = [cell for cell in cells if cell[value] is not None]
    if not known:
        return None
    with _rows([_label(cell) + (f"\n{note(cell)}" if note else "") for cell in known], words) as axes:
        axes.barh(range(len(known)), [cell[value] for cell in known], color=_BLUE, height=0.7)
    return axes.get_figure(root=True)


def beside_control(cells: Sequence[Cell], *, value: str, control: str, words: str) -> Figure | None:
    """Two bars per cell: its own, and its control's of the same windows, since bars of different windows tell the
    machine's drift as much as the cells."""
    known = [cell for cell in cells if cell[value] is not None and cell[control] is not None]
    if not known:
        return None
    with _rows([_label(cell) for cell in known], words) as axes:
        for key, legend, colour, shift in ((value, "cell", _BLUE, -0.19), (control, "its control", _ORANGE, 0.19)):
            places = [place + shift for place in range(len(known))]
            axes.barh(places, [cell[key] for cell in known], color=colour, height=0.38, label=legend)
    return axes.get_figure(root=True)


def stacked(cells: Sequence[Cell], parts: Sequence[tuple[str, str]], words: str) -> Figure | None:
    """Bars of parts (key, legend) that add up, of the cells that have all of them."""
    known = [cell for cell in cells if all(cell[key] is not None for key, _ in parts)]
    if not known:
        return None
    with _rows([_label(cell) for cell in known], words) as axes:
        start = [0.0] * len(known)
        for (key, legend), colour in zip(parts, (_BLUE, _ORANGE), strict=False):
            lengths = [cell[key] for cell in known]
            axes.barh(range(len(known)), lengths, left=start, color=colour, height=0.7, label=legend)
            start = [a + b for a, b in zip(start, lengths, strict=True)]
    return axes.get_figure(root=True)


def main_effects(found: Sequence[Effect]) -> Figure | None:
    """A point with its interval per value of an axis; the thin line reaches from the least to the most favourable of
    the settings beside it."""
    if not found:
        return None
    labels = [f"{e.axis}: {e.value}\ninstead of {e.reference} (n = {e.contrast.n})" for e in found]
    words = "times as fast: mean with 95\N{NO-BREAK SPACE}% interval (thick), least and most of its n pairs (thin)"
    with _rows(labels, words) as axes:
        for place, effect in enumerate(found):
            c = effect.contrast
            axes.plot([c.least, c.most], [place, place], color=_ORANGE, linewidth=1.0)
            axes.plot([c.low, c.high], [place, place], color=_BLUE, linewidth=4.0, solid_capstyle="butt")
            axes.plot([c.value], [place], "o", color=_INK, markersize=4)
        axes.axvline(1.0, color=_INK, linewidth=0.8, linestyle="--")
    return axes.get_figure(root=True)


def roofs(cells: Sequence[Cell]) -> Figure | None:
    """Achieved TFLOP/s of each cell as a bar, and its roof: the peak of matmuls in its precision."""
    known = [cell for cell in cells if cell["tflops"] and cell["peak"]]
    if not known:
        return None
    with _rows([_label(cell) for cell in known], "TFLOP/s of the training step") as axes:
        axes.barh(range(len(known)), [cell["tflops"] for cell in known], color=_BLUE, height=0.7, label="achieved")
        for place, cell in enumerate(known):
            label = "roof: peak of matmuls in this precision" if place == 0 else None
            axes.plot([cell["peak"]] * 2, [place - 0.4, place + 0.4], color=_ORANGE, linewidth=2.5, label=label)
            share = f"{100 * cell['tflops'] / cell['peak']:.0f} %"
            axes.annotate(share, (cell["tflops"], place), xytext=(4, -3), textcoords="offset points")
    return axes.get_figure(root=True)


def roofline(cells: Sequence[Cell]) -> Figure | None:
    """Achieved TFLOP/s over FLOP per byte, under the slope of the memory's bandwidth and the flat roof of each
    precision's matmuls (medians of what the cells' trials measured). Numbers are those of the table."""
    known = [cell for cell in cells if all(cell[key] for key in ("tflops", "peak", "gflops", "gbytes", "bandwidth"))]
    if not known:
        return None
    peaks: dict[str, list[float]] = {}
    for cell in known:
        peaks.setdefault(str(cell["setup"].get("precision")), []).append(cell["peak"])
    bandwidth = statistics.median(cell["bandwidth"] for cell in known) / 1e3  # TB/s
    intensity = [cell["gflops"] / cell["gbytes"] for cell in known]
    ridges = [statistics.median(values) / bandwidth for values in peaks.values()]
    left, right = min([*intensity, *ridges]) / 3, max([*intensity, *ridges]) * 3
    with _drawing(4.6) as (figure, axes):
        top = max(ridges)
        axes.plot([left, top], [left * bandwidth, top * bandwidth], color=_INK, linewidth=1.2,
                  label=f"memory, {1e3 * bandwidth:,.0f} GB/s")  # fmt: skip
        for (precision, values), ridge, style in zip(peaks.items(), ridges, itertools.cycle(("-", "--", ":", "-."))):
            axes.plot([ridge, right], [ridge * bandwidth] * 2, color=_ORANGE, linestyle=style,
                      label=f"matmuls in {precision}, {statistics.median(values):.3g} TFLOP/s")  # fmt: skip
        axes.scatter(intensity, [cell["tflops"] for cell in known], color=_BLUE, zorder=3, label="setup")
        points = sorted((x, cell["tflops"], cell["number"]) for x, cell in zip(intensity, known, strict=True))
        _numbers(axes, points, ((-7, -4, "right"), (7, -4, "left")))
        axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of the model's step", ylabel="TFLOP/s")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter("{x:g}")  # a formatter's own powers of ten would be shown as their source
            axis.set_minor_formatter("")
        _legend(figure, axes)
        return figure


def _numbers(
    axes: Axes, points: Sequence[tuple[float, float, int]], places: Sequence[tuple[float, float, str]]
) -> None:
    """The numbers of points (x, y, number) beside them, from one to the next at another place (points of type from the
    point, and which side of the number is there): neighbours keep apart."""
    for (x, y, number), (right, up, side) in zip(points, itertools.cycle(places)):
        axes.annotate(str(number), (x, y), xytext=(right, up), textcoords="offset points", ha=side)


def front(cells: Sequence[Cell]) -> list[Cell]:
    """Cells that no other cell beats in both step time and velocity MSE (Pareto), fastest first. Times within 2 % and
    scores within ``SAME_MSE`` are equal."""
    known = {str(place): cell for place, cell in enumerate(cells) if cell["ms"] is not None and cell["mse"] is not None}
    points = {key: (cell["ms"], cell["mse"]) for key, cell in known.items()}
    return sorted((known[key] for key in pareto_front(points, (SAME, SAME_MSE))), key=lambda cell: cell["ms"])


def scatter(cells: Sequence[Cell]) -> Figure | None:
    """Step time against velocity MSE, the Pareto front marked; numbers are those of the table."""
    known = [cell for cell in cells if cell["ms"] is not None and cell["mse"] is not None]
    if not known:
        return None
    best = front(known)
    with _drawing(4.0) as (figure, axes):
        axes.scatter([cell["ms"] for cell in known], [cell["mse"] for cell in known], color=_BLUE, label="setup")
        axes.plot([cell["ms"] for cell in best], [cell["mse"] for cell in best], "o--", color=_ORANGE,
                  markerfacecolor="none", markersize=11, label="Pareto front")  # fmt: skip
        _numbers(axes, sorted((cell["ms"], cell["mse"], cell["number"]) for cell in known),
                 ((0, 8, "center"), (0, -16, "center")))  # fmt: skip
        axes.set(xlabel="ms/step", ylabel="velocity MSE (lower is better)")
        axes.ticklabel_format(useOffset=False)
        low, high = axes.get_ylim()
        middle, least = (low + high) / 2, 2e-3 * max(cell["mse"] for cell in known)
        axes.set_ylim(min(low, middle - least), max(high, middle + least))  # rounding is not drawn as a difference
        _legend(figure, axes)
        return figure


def curves(found: Sequence[tuple[Cell, Curve]], *, by: str) -> Figure | None:
    """Training loss, one line per cell, by ``steps`` or by ``seconds`` (of training alone)."""
    drawn = [(cell, curve) for cell, curve in found if by == "steps" or curve.seconds is not None]
    if not drawn:
        return None
    with _drawing(3.4 + 0.17 * len(drawn)) as (figure, axes):
        for place, (cell, curve) in enumerate(drawn):  # lines that coincide show one inside the other
            width = 1.0 + 4.0 * (1 - place / len(drawn))
            axes.plot(getattr(curve, by), curve.losses, linewidth=width, label=_label(cell))
        axes.set(xlabel={"steps": "step", "seconds": "seconds of training"}[by], ylabel="training loss")
        _legend(figure, axes)
        return figure
