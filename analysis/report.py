"""One self-contained HTML page about sweeps: what to use, how sure that is, what it costs, and all cells.

python analysis/report.py runs/published-20261202-091910             writes report.html here, its figures to plots/
python analysis/report.py runs --out page.html                       every sweep inside, each with tables of its own
python analysis/report.py tinydit --tracking-uri sqlite:///mlflow.db   from MLflow

Cells of different sweeps, node kinds or data never stand in one table. The figures are also written as PNG and SVG.
"""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analysis.advice import advice
from analysis.cells import Cell, cells_of, groups_of
from analysis.effects import Interaction, interactions
from analysis.export import facts
from analysis.load import SweepData, load
from tinydit_ray.atomic import replacing
from tinydit_ray.config import AXES
from tinydit_ray.sweep.errors import OK, USAGE, UsageError
from tinydit_ray.sweep.seeds import verdict_lines

if TYPE_CHECKING:
    from analysis.figures import Drawn

MOST_INTERACTIONS = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for what a person asked for and cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", metavar="SWEEP", help="folder, or run, experiment or name in MLflow")
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow store of sweeps that are no folder")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="default: report.html")
    parser.add_argument("--no-plots", action="store_true", help="the page alone, no PNG and SVG files")
    options = parser.parse_args(argv)
    try:
        make_report(load(options.sweeps, options.tracking_uri), options.out, plots=not options.no_plots)
    except UsageError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return USAGE
    print(options.out)
    return OK


def make_report(sweeps: Sequence[SweepData], out: Path, *, plots: bool = True) -> None:
    """Write the page, and its figures to ``plots/`` beside it. Raises UsageError."""
    environment = _environment()
    from analysis.figures import figures, save_all

    groups = [group for sweep in sweeps for group in groups_of(sweep)]
    cells = [cells_of(group["rows"]) for group in groups]
    drawn = [figures(group["sweep"], found) for group, found in zip(groups, cells, strict=True)]
    text = environment.get_template("report.html.j2").render(
        groups=[section(*parts, f"g{place}") for place, parts in enumerate(zip(groups, cells, drawn, strict=True))]
    )
    try:
        with replacing(out) as temporary:
            temporary.write_text(text, "utf-8")
        for place, found in enumerate(drawn if plots else []):
            save_all(found, out.parent / "plots", f"{place + 1}-" if len(drawn) > 1 else "")
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror or error})") from None


def _environment() -> Any:
    """Raises UsageError where the packages of the extra ``report`` are missing."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        import analysis.plots  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{error.name} is missing: pip install 'tinydit-ray[report]'") from None
    place = FileSystemLoader(Path(__file__).resolve().parent / "templates")
    environment = Environment(loader=place, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["num"] = number
    return environment


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def section(group: dict[str, Any], cells: Sequence[Cell], drawn: Sequence[Drawn], salt: str) -> dict[str, Any]:
    """Everything that the template shows of one group."""
    sweep = group["sweep"]
    kind, source, digest = group["key"]
    found = interactions(cells)
    known = {name: words for name, words in facts(sweep) if words}
    return {
        "facts": list(known.items()), "machine": in_short(sweep, known),
        "name": sweep.name, "origin": sweep.origin, "kind": kind or "unknown machine",
        "data": f"{source} {digest}".strip() or "unknown data", "cells": cells, "advice": advice(cells),
        "spread": verdict_lines(group["rows"]), "samplers": any(cell["sampling"] for cell in cells),
        "interactions": found[:MOST_INTERACTIONS], "together": together(found),
        "axes": axes_of(cells), "figures": [item.shown(salt) for item in drawn],
        "samples": samples(sweep, cells), "problems": problems(group),
    }  # fmt: skip


def in_short(sweep: SweepData, known: Mapping[str, str]) -> str:
    """Machine, torch and day of the facts that are known, in one line."""
    torch = (sweep.content.get("versions") or {}).get("torch")
    parts = [known.get("machine"), f"torch {torch}" if torch else None, known.get("date", "")[:10]]
    return " · ".join(part for part in parts if part)


def axes_of(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """The axes that vary among the cells, each with its values, for the page's filters."""
    values = {axis: list(dict.fromkeys(str(cell["setup"].get(axis)) for cell in cells)) for axis in ("model", *AXES)}
    return {axis: found for axis, found in values.items() if len(found) > 1}


def together(found: Sequence[Interaction]) -> list[str]:
    """In words, the interactions whose interval excludes 1."""
    return [item.words for item in found if item.contrast.helps or item.contrast.harms][:MOST_INTERACTIONS]


def samples(sweep: SweepData, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The first sample grid of each cell as a data: URI."""
    found = []
    for cell in cells:
        image = next((image for row in cell["rows"] if (image := sweep.files.samples(row))), None)
        if image:
            uri = "data:image/png;base64," + base64.b64encode(image).decode("ascii")
            found.append({"number": cell["number"], "name": cell["name"], "uri": uri})
    return found


def problems(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Rounds that are not ok, with their reasons, and cells of the grid without any record."""
    bad = [
        {"name": row["cell_name"], "round": row["round"], "status": row["status"], "reason": row["reason"] or "–"}
        for row in group["rows"] if row["status"] != "ok"
    ]  # fmt: skip
    return bad + [
        {"name": name, "round": "–", "status": "not run", "reason": "the sweep has no record of it"}
        for name in group["missing"]
    ]


if __name__ == "__main__":
    sys.exit(main())
