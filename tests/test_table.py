"""The table at a sweep's end: what is read on a narrow screen, and what is in the file."""

from __future__ import annotations

import ast
import io
from pathlib import Path
from typing import Any

import pytest
from fake_sweep import SETUPS, record_of
from rich.console import Console

from tinydit_ray.config import from_mapping
from tinydit_ray.record import FLAGS
from tinydit_ray.sweep.results import result_rows
from tinydit_ray.sweep.table import print_table, summary_text

SOURCES = Path(__file__).parent.parent / "tinydit_ray"


def rows() -> list[dict[str, Any]]:
    records = [
        record_of(from_mapping(setup), round_=round_, number=5 * round_ + place, sweep_id="s")
        for round_ in (1, 2, 3) for place, setup in enumerate(SETUPS)
    ]  # fmt: skip
    records[3] |= {"status": "failed", "reason": "CppCompileError: no <omp.h> where a long reason goes on and on"}
    return result_rows(records)


def printed(width: int) -> str:
    buffer = io.StringIO()
    print_table(Console(file=buffer, width=width), rows())
    return buffer.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 160, 250])
def test_numbers_and_verdicts_are_whole_at_any_width(width: int) -> None:
    text = printed(width)
    for row in rows():
        if row["status"] == "ok" and row["cell_id"] != rows()[3]["cell_id"]:
            assert f"{row['speedup_pooled']:.3f}" in text
            assert f"{row['speedup_pooled_ci_low']:.3f} – {row['speedup_pooled_ci_high']:.3f}" in text
            assert row["verdict"] in text
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines() if not line.startswith("flag "))


def test_what_a_narrow_terminal_leaves_out_is_named_and_is_in_the_file() -> None:
    narrow, file = printed(80), summary_text(rows())
    names = narrow[narrow.index("not in 80 columns:") :].replace("\n", " ").split(":")[1].split(" (see")[0].strip()
    assert "loss" in names.split(", ")
    assert "first step s" in names.split(", ")
    header = next(line for line in file.splitlines() if "ms/step" in line)
    assert all(name in header for name in names.split(", "))
    assert "not in" not in file
    assert not any(line != line.rstrip() for line in file.splitlines())


def test_a_failed_cells_reason_is_there_and_flags_are_explained_once() -> None:
    assert "CppCompileError: no <omp.h>" in printed(250)
    for width in (80, 250):
        notes = [line for line in printed(width).splitlines() if line.startswith("flag ")]
        assert notes == [f"flag few-steps ({FLAGS['few-steps']}): all cells"]


def test_every_flag_of_the_timing_has_its_meaning() -> None:
    """The names that measure.py raises, read from its source."""
    tree = ast.parse((SOURCES / "measure.py").read_text("utf-8"))
    raised = {
        key.value
        for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_flag_timing"
        for inner in ast.walk(node) if isinstance(inner, ast.Dict)
        for key in inner.keys if isinstance(key, ast.Constant) and key.value != "flags"
    }  # fmt: skip
    assert raised
    assert raised <= set(FLAGS)
