"""CSV, Parquet and the benchmark card."""

from __future__ import annotations

import re

import pandas as pd
import pyarrow.dataset
import pytest
from analysis_help import ROOT, make_grid_sweep, product, script_here
from pandas.testing import assert_frame_equal

from analysis.export import card, export, summary_of
from analysis.load import frame_of, load
from tinydit_ray.sweep.results import RESULT_COLUMNS

CELLS = product(precision=["fp32", "bf16"], compile=["off", "default"])


def odd(record):
    if record["config.precision"] == "bf16" and record["config.compile"] == "off":
        numbers = dict.fromkeys(("ms_per_step", "speedup_vs_control", "velocity_mse", "flags"))
        return {**numbers, "status": "failed", "reason": "a | b, \"c\"\nd", "batch_hash": ""}
    return {}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    top = tmp_path_factory.mktemp("export")
    for name in ("one", "two"):
        make_grid_sweep(top / "runs" / name, CELLS, change=odd)
    done = script_here("export.py", "runs", "--out", "out", cwd=top)
    assert (done.returncode, done.stderr) == (0, "")
    return top, load([top / "runs"])


def test_csv_and_parquet_hold_the_same_summary(made):
    top, _ = made
    table = pd.read_parquet(top / "out" / "summary.parquet")
    assert len(table) == 2 * len(CELLS)
    text = pd.read_csv(top / "out" / "summary.csv")
    assert list(text.columns) == list(table.columns)
    for name in ("speedup_pooled", "velocity_mse", "probe_fd", "config.lr"):
        assert_frame_equal(text[[name]], table[[name]].astype("float64"))
    failed = table[table["status"].str.startswith("failed")]
    assert failed["speedup_pooled"].isna().all()
    assert set(failed["reason"]) == {"a | b, \"c\"\nd"}
    assert sorted(text["reason"].dropna()) == sorted(failed["reason"])
    # the control's cell is there: nothing of it is missing to a group-by of settings
    assert table.groupby([name for name in table if name.startswith("config.")]).size().sum() == len(table)


def test_the_rows_come_back_as_they_were_from_the_partitioned_folder(made):
    top, sweeps = made
    assert {path.name.split("=")[0] for path in (top / "out" / "rows").iterdir()} == {"sweep_id"}
    back = pyarrow.dataset.dataset(top / "out" / "rows", partitioning="hive").to_table().to_pandas()
    expected = frame_of(sweeps)
    keys = ["sweep_id", "cell_id", "round"]
    back = back[list(RESULT_COLUMNS)].sort_values(keys).reset_index(drop=True)
    expected = expected.sort_values(keys).reset_index(drop=True)
    for name in RESULT_COLUMNS:
        assert list(back[name].isna()) == list(expected[name].isna()), name
        known = expected[name].notna()
        assert list(back[name][known]) == list(expected[name][known]), name
    export(sweeps, top / "out")  # once more: no row twice
    assert pyarrow.dataset.dataset(top / "out" / "rows").count_rows() == len(expected)


def test_the_card_names_machine_versions_n_and_intervals(made):
    _, sweeps = made
    text = card(sweeps[0])
    for words in ("2 × a processor", "torch 2.9.0", "3 rounds", "95 % interval", "not FID"):
        assert words in text
    assert "s3cret" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(CELLS)
    assert {line.replace("\\|", "").count("|") for line in rows} == {10}
    best = max(sweeps[0].rows, key=lambda row: row["speedup_pooled"] or 0)
    assert f"{best['speedup_pooled_ci_low']:.3f} – {best['speedup_pooled_ci_high']:.3f}" in text


LINES = re.findall(
    r"^(?:pd|duckdb|pl)\..*export/rows.*$", (ROOT / "docs" / "analysis.md").read_text("utf-8"), re.MULTILINE
)


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES, ids=[line.split(".")[0] for line in LINES])
def test_a_documented_line_reads_the_rows(made, line, monkeypatch):
    """Each gives something of every row, or the median of each precision."""
    short = line.split(".")[0]
    package = pytest.importorskip({"pd": "pandas", "duckdb": "duckdb", "pl": "polars"}[short])
    top, sweeps = made
    (top / "export").exists() or (top / "export").symlink_to(top / "out")
    monkeypatch.chdir(top)
    found = eval(line, {short: package})
    expected = frame_of(sweeps)
    if short == "pd":
        assert len(found) == len(expected)
        return
    rows = found.fetchall() if short == "duckdb" else found.collect().rows()
    medians = expected.groupby("config.precision")["speedup_vs_control"].median()
    assert {key: pytest.approx(value) for key, value in rows} == dict(medians)


def test_all_three_are_documented():
    assert {line.split(".")[0] for line in LINES} == {"pd", "duckdb", "pl"}


def test_a_folder_that_cannot_be_written_is_one_line(made, tmp_path):
    (tmp_path / "file").write_text("")
    done = script_here("export.py", str(made[0] / "runs" / "one"), "--out", "file/x", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("--out file/x: cannot be written")
    assert summary_of([]).num_rows == 0
