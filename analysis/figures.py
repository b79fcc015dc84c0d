"""Which figures a group of cells has, in the order of the page, and why one is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis import plots
from analysis.advice import break_even
from analysis.cells import Cell
from analysis.effects import effects
from analysis.load import Curve, SweepData
from tinydit_ray.record import flags_of
from tinydit_ray.sweep.quality import PACE_FLAG

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CURVES = 10  # more lines in one figure cannot be told apart
ROOFLINE = (
    "Bytes: what the model's step moves if each operation reads its inputs and writes its outputs once; fused kernels"
    " and caches move less, so a setup may stand above the slope. Bandwidth measured by adding two arrays into a third."
)
SMOOTH = 3  # logged losses that a level must hold for


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A figure, or why there is none; ``words`` is what a reader must know beside it."""

    name: str  # of its files
    title: str
    figure: Figure | None
    why: str
    words: str = ""

    def shown(self, salt: str) -> dict[str, Any]:
        from markupsafe import Markup

        svg = Markup(plots.svg_of(self.figure, f"{salt}{self.name}")) if self.figure else None
        return {"title": self.title, "svg": svg, "why": self.why, "words": self.words}


def figures(sweep: SweepData, cells: Sequence[Cell]) -> list[Drawn]:
    found = loss_curves(sweep, cells)
    shown = found[:MOST_CURVES]
    note = f" (the {MOST_CURVES} fastest of those with a curve)" if len(found) > MOST_CURVES else ""
    return [
        *_speed(cells),
        Drawn(name="pareto", title="Step time and quality", figure=plots.scatter(cells),
              why="no cell has both ms/step and a velocity MSE"),
        Drawn(name="loss-steps", title="Loss by step" + note, figure=plots.curves(shown, by="steps"),
              why="no round left a loss.csv within reach"),
        Drawn(name="loss-seconds", title="Loss by seconds of training" + note,
              figure=plots.curves(shown, by="seconds"), why="no loss curve here has its seconds",
              words="The compile is among them." if any(_compile_in_clock(cell) for cell, _ in shown)
              else "Without the compile, which went before."),
        _time_to_quality(found),
        *_costs(cells),
    ]  # fmt: skip


def _speed(cells: Sequence[Cell]) -> list[Drawn]:
    sources = sorted({cell["peak_source"] for cell in cells if cell["peak_source"]})
    return [
        Drawn(name="speedup", title="Speed-up", figure=plots.speedups(cells), why="no cell has a speed-up"),
        Drawn(name="effects", title="What each switch does by itself", figure=plots.main_effects(effects(cells)),
              why="no two setups differ in one switch alone",
              words="Each value against the reference, over pairs of setups that are alike in everything else."),
        Drawn(name="peak", title="Against the machine's peak", figure=plots.roofs(cells),
              why="no cell has a measured peak", words=f"Peak: {', '.join(sources)}." if sources else ""),
        Drawn(name="roofline", title="Roofline", figure=plots.roofline(cells),
              why="no cell has the bandwidth of its memory", words=f"{ROOFLINE} {bound(cells)}".strip()),
    ]  # fmt: skip


def bound(cells: Sequence[Cell]) -> str:
    """In words, which roof is the lower one for the model's step, for each precision that was measured."""
    words: dict[str, str] = {}
    for cell in cells:
        if all(cell[key] for key in ("peak", "gflops", "gbytes", "bandwidth")):
            memory_s, arithmetic_s = cell["gbytes"] / cell["bandwidth"], cell["gflops"] / 1e3 / cell["peak"]
            roof = "memory" if memory_s > arithmetic_s else "arithmetic"
            words.setdefault(
                str(cell["setup"].get("precision")),
                f"the step, unfused, needs {1e3 * memory_s:,.0f} ms of memory traffic and {1e3 * arithmetic_s:,.0f} ms"
                f" of matmuls: {roof} is its lower roof",
            )
    return ". ".join(f"In {precision}: {text}" for precision, text in words.items()) + "." if words else ""


def _costs(cells: Sequence[Cell]) -> list[Drawn]:
    memory = "device_mb" if any(cell["device_mb"] for cell in cells) else "rss_mb"
    what = "peak device memory, MB" if memory == "device_mb" else "peak memory of the process, MB"
    compiled = [cell for cell in cells if cell["compile"] is not None and cell["setup"].get("compile") != "off"]
    return [
        Drawn(name="compile", title="Compile cost and break-even", why="nothing here was compiled",
              figure=plots.bars(compiled, value="compile", note=lambda cell: break_even(cell).replace(" (", "\n("),
                                words="seconds of compiling in the first step (round 1, cold cache)")),
        Drawn(name="memory", title="Memory", figure=plots.bars(cells, value=memory, words=what),
              why="no round recorded its memory"),
        Drawn(name="sampling", title="Sampling", why="this sweep did not time sampling",
              figure=plots.beside_control(cells, value="sampling", control="sampling_control",
                                          words="ms per sampled image, each beside the control of the same windows")),
    ]  # fmt: skip


def loss_curves(sweep: SweepData, cells: Sequence[Cell]) -> list[tuple[Cell, Curve]]:
    """The first curve of each cell; fastest cells first where there are too many to draw."""
    found = []
    for cell in cells:
        curve = next((curve for row in cell["rows"] if (curve := sweep.files.curve(row))), None)
        if curve:
            found.append((cell, curve))
    if len(found) > MOST_CURVES:
        found.sort(key=lambda pair: -(pair[0]["speedup"] or 0.0))
    return found


def _time_to_quality(found: Sequence[tuple[Cell, Curve]]) -> Drawn:
    target, cells = time_to_quality(found)
    words = f"Until the mean of {SMOOTH} logged training losses is at most {target:.4f}, which all of them reach."
    figure = plots.stacked(
        cells, [("compile", "compiling"), ("train_s", "training")], "seconds until the loss is reached"
    )
    return Drawn(name="time-to-quality", title="Time to quality", figure=figure, words=words if cells else "",
                 why="fewer than two loss curves have seconds")  # fmt: skip


def time_to_quality(found: Sequence[tuple[Cell, Curve]]) -> tuple[float, list[Cell]]:
    """The lowest loss that every curve reaches, and the cells with ``train_s``, the seconds they trained until then.
    Of a setup that is not compiled the compile time is 0."""
    timed = [(cell, curve, _smooth(curve)) for cell, curve in found if curve.seconds and len(curve.losses) >= SMOOTH]
    if len(timed) < 2:
        return float("nan"), []
    target = max(min(losses) for _, _, losses in timed)
    cells = []
    for cell, curve, losses in timed:
        first = next(i for i, loss in enumerate(losses) if loss <= target) + SMOOTH - 1
        compiling = (cell["compile"] if cell["setup"].get("compile") != "off" else 0.0) or 0.0
        seconds = (curve.seconds or [])[first] - (compiling if _compile_in_clock(cell) else 0.0)
        cells.append({**cell, "train_s": seconds, "compile": compiling})
    return target, cells


def _compile_in_clock(cell: Cell) -> bool:
    """A quality grid's first training step compiles; a speed grid has timed its steps before it trains."""
    return any(PACE_FLAG in flags_of(row) for row in cell["rows"])


def _smooth(curve: Curve) -> list[float]:
    return [sum(curve.losses[i : i + SMOOTH]) / SMOOTH for i in range(len(curve.losses) - SMOOTH + 1)]


def save_all(drawn: Sequence[Drawn], folder: Path, prefix: str = "") -> list[Path]:
    """Every figure as PNG and as SVG; what an earlier report drew and this one has not is removed."""
    paths = []
    for item in drawn:
        for path in (folder / f"{prefix}{item.name}.{kind}" for kind in ("svg", "png")):
            if item.figure:
                folder.mkdir(parents=True, exist_ok=True)
                plots.save(item.figure, path)
                paths.append(path)
            else:
                path.unlink(missing_ok=True)
    return paths
