"""The report of a sweep, written into its folder at the end, so that it goes to MLflow with the summary.

``analysis/`` stands above this package and is no part of it: it is looked up by name when everything is measured and
kept, and an installed package without it has no report. Whatever goes wrong there harms no sweep.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]


def attach_report(folder: Path, console: Console) -> None:
    """Write report, plots and summary files into the sweep's folder, and say in one line where, or why not."""
    if not (ROOT / "analysis" / "attach.py").exists():
        return
    try:
        if str(ROOT) not in sys.path:
            sys.path.append(str(ROOT))
        report = importlib.import_module("analysis.attach").attach(folder)
        console.print(f"report: {report}", highlight=False, markup=False, soft_wrap=True)
    except Exception as error:
        traceback.print_exc()  # into the driver's log
        why = " ".join(str(error).split()) or type(error).__name__
        console.print(f"no report was written ({why})", highlight=False, markup=False, soft_wrap=True)
