"""What a sweep's folder gets at the sweep's end: ``report.html``, ``plots/``, ``summary.{md,csv,parquet}``."""

from __future__ import annotations

from pathlib import Path

from analysis.export import export_summary
from analysis.load import from_folder
from analysis.report import make_report


def attach(folder: Path) -> Path:
    """Write all of it; the path of the report. Raises UsageError where packages are missing."""
    sweeps = [from_folder(folder)]
    export_summary(sweeps, folder)
    make_report(sweeps, folder / "report.html")
    return folder / "report.html"
