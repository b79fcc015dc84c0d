"""Records: whole rows or none, whatever happened to the file; and the results table made from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tinydit_ray.config import from_mapping
from tinydit_ray.record import (
    BAD_STATUSES,
    COLUMNS,
    POOLED,
    SCHEMA_VERSION,
    STATUSES,
    Record,
    append_record,
    last_attempts,
    new_record,
    read_records,
    undisturbed,
    update,
)
from tinydit_ray.sweep.results import RESULT_COLUMNS, result_rows, write_results

SPECIFIED = """schema_version sweep_id config_id cell_id cell_name repeat round seed attempt status reason
started_at product_version git_commit node_id node_kind data_source data_digest batch_hash
import_s data_s build_s first_step_s compile_s ms_per_step ms_per_step_iqr ms_per_step_p10
ms_per_step_p90 timed_steps images_per_s model_gflops_per_step tflops_per_s mfu control_ms_per_step
speedup_vs_control speedup_ci_low speedup_ci_high foreign_cpu_pct concurrent_trials compile_cache flags
scaling_efficiency sample_ms_per_image break_even_steps skipped_optimizer_steps peak_rss_mb peak_device_mb
velocity_mse velocity_mse_ema probe_fd_ema time_to_quality_s probe_fd probe_fd_n probe_id train_loss_last
steps_trained train_wall_s queued_s start_s orchestration_s"""
KIND = {str: "größe", int: 3, float: 1.5}


def full_record(cell_id: str = "c", **values: Any) -> Record:
    """A row with something in every column."""
    record = new_record(**{name: KIND[kind] for name, kind in COLUMNS.items()})
    identity = {"cell_id": cell_id, "repeat": 0, "round": 1, "attempt": 1, "status": "ok", "schema_version": 1}
    update(record, identity | values)
    return record


def timed(cell_id: str, round_: int, speedup: float, ms: float = 100.0, **values: Any) -> Record:
    return full_record(
        cell_id, round=round_, speedup_vs_control=speedup, speedup_ci_low=speedup * 0.99,
        speedup_ci_high=speedup * 1.01, ms_per_step=ms, timed_steps=60, **values,
    )  # fmt: skip


# --- rows -------------------------------------------------------------------------------------------------


def test_a_record_has_every_column_of_the_specification():
    assert not set(SPECIFIED.split()) - COLUMNS.keys()
    assert COLUMNS.keys() >= from_mapping({}).columns().keys()
    assert set(POOLED) == {
        "ms_per_step_pooled", "speedup_pooled", "speedup_pooled_ci_low", "speedup_pooled_ci_high", "verdict",
        "quality_verdict",
    }  # fmt: skip
    assert STATUSES == ("ok", "oom", "timeout", "unsupported", "diverged", "failed", "skipped")
    assert set(BAD_STATUSES) < set(STATUSES)


def test_a_new_record_is_empty_but_for_what_is_given():
    record = new_record(cell_id="a", ms_per_step=2)
    assert list(record) == list(COLUMNS)
    given_ = {"cell_id": "a", "ms_per_step": 2.0, "schema_version": SCHEMA_VERSION}
    assert {name: value for name, value in record.items() if value is not None} == given_
    assert type(record["ms_per_step"]) is float


def test_a_configs_columns_fit_into_a_record():
    columns = from_mapping({"precision": "bf16"}).columns()
    assert {name: new_record(**columns)[name] for name in columns} == columns


def test_unknown_columns_are_refused():
    with pytest.raises(KeyError, match="ms_per_stp"):
        new_record(ms_per_stp=1.0)
    with pytest.raises(KeyError, match="verdict"):  # of the pooled rows alone
        update(new_record(), {"verdict": "faster"})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
@pytest.mark.parametrize("column", ["velocity_mse", "timed_steps"])
def test_a_number_that_is_not_finite_becomes_none(column: str, value: float):
    record = new_record()
    update(record, {column: value})
    assert record[column] is None


def test_numbers_of_other_libraries_become_plain():
    record = new_record(ms_per_step=np.float32(0.5), timed_steps=np.int64(4), flags="")
    assert (record["ms_per_step"], record["timed_steps"], record["flags"]) == (0.5, 4, "")
    assert {type(record[name]) for name in ("ms_per_step", "timed_steps")} == {float, int}
    json.dumps(record)


# --- the file ---------------------------------------------------------------------------------------------


def test_what_is_appended_is_read_in_order(tmp_path: Path):
    path = tmp_path / "records.jsonl"
    assert read_records(path) == []
    rows = [full_record("a", reason="zwei\nZeilen \u2028 \x85 { }"), full_record("b", ms_per_step=None)]
    for row in rows:
        append_record(path, row)
    assert read_records(path) == rows
    assert path.read_bytes().count(b"\n") == 2
    assert path.read_bytes().endswith(b"\n")


def test_a_row_with_a_number_that_is_not_finite_is_never_written(tmp_path: Path):
    path = tmp_path / "records.jsonl"
    with pytest.raises(ValueError, match="JSON"):
        append_record(path, {**full_record(), "ms_per_step": math.inf})
    assert read_records(path) == []


@pytest.mark.parametrize("kept", [1, 20, 0.5, -2])
def test_a_torn_last_line_is_left_out_and_the_next_row_is_not_glued_to_it(tmp_path: Path, kept: float):
    path = tmp_path / "records.jsonl"
    append_record(path, full_record("a"))
    whole = path.stat().st_size
    append_record(path, full_record("b"))
    size = path.stat().st_size - whole
    with open(path, "r+b") as file:
        file.truncate(whole + (int(kept * size) if 0 < kept < 1 else kept if kept > 0 else size + kept))
    assert [row["cell_id"] for row in read_records(path)] == ["a"]
    append_record(path, full_record("c"))
    assert [row["cell_id"] for row in read_records(path)] == ["a", "c"]


def test_a_line_that_lacks_only_its_end_is_kept(tmp_path: Path):
    path = tmp_path / "records.jsonl"
    append_record(path, full_record("a"))
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)
    append_record(path, full_record("b"))
    assert [row["cell_id"] for row in read_records(path)] == ["a", "b"]


def test_older_rows_get_the_columns_they_lack(tmp_path: Path):
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps({"cell_id": "old", "status": "ok", "of_another_day": 3}) + "\n")
    append_record(path, full_record("new"))
    old, new = read_records(path)
    assert (old["cell_id"], old["of_another_day"]) == ("old", 3)
    assert {old[name] for name in COLUMNS.keys() - {"cell_id", "status"}} == {None}
    assert old.keys() >= COLUMNS.keys()
    assert new == full_record("new")


@pytest.mark.parametrize(
    "line",
    [b"3", b"[]", b'"text"', b"null", b"{}", b'{"status": "ok"}', b"\xff\xfe\x00", b"\x00" * 50, b"{" * 20,
     b"[" * 100_000, b"9" * 6000, b'{"cell_id": ' + b"[" * 100_000],
    ids=lambda line: repr(line[:16]),
)  # fmt: skip
def test_a_line_that_is_no_row_is_left_out(tmp_path: Path, line: bytes):
    path = tmp_path / "records.jsonl"
    append_record(path, full_record("a"))
    with open(path, "ab") as file:
        file.write(line + b"\n")
    append_record(path, full_record("b"))
    assert [row["cell_id"] for row in read_records(path)] == ["a", "b"]


ROWS = [full_record(name, round=number) for number, name in enumerate("abcd", start=1)]
CONTENT = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "records.jsonl"


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, len(CONTENT)))
def test_a_file_cut_anywhere_gives_whole_rows_alone(damaged: Path, cut: int):
    damaged.write_bytes(CONTENT[:cut])
    found = read_records(damaged)
    assert found == ROWS[: len(found)]
    ends = [i + 1 for i, byte in enumerate(CONTENT) if byte == 0x0A]
    assert len(found) == sum(cut >= end - 1 for end in ends)
    append_record(damaged, full_record("z"))
    assert read_records(damaged) == [*found, full_record("z")]


@settings(max_examples=150, deadline=None)
@given(start=st.integers(0, len(CONTENT)), junk=st.binary(max_size=40), replaced=st.integers(0, 3000))
@example(start=0, junk=b"\xef\xbb\xbf", replaced=0)
@example(start=100, junk=b"\x00" * 30, replaced=30)
def test_a_damaged_file_never_raises_and_rows_away_from_the_damage_are_whole(
    damaged: Path, start: int, junk: bytes, replaced: int
):
    damaged.write_bytes(CONTENT[:start] + junk + CONTENT[start + replaced :])
    found = read_records(damaged)
    ends = [i + 1 for i, byte in enumerate(CONTENT) if byte == 0x0A]
    for row, first, end in zip(ROWS, [0, *ends[:-1]], ends, strict=True):
        if end <= start or (first > start + replaced):
            assert row in found
    for row in found:
        assert row.keys() >= COLUMNS.keys()
    assert len(found) <= len(ROWS) + junk.count(b"\n")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_make_reading_raise(damaged: Path, content: bytes):
    damaged.write_bytes(content)
    assert read_records(damaged) == []


# --- attempts and results ---------------------------------------------------------------------------------


def test_the_last_attempt_of_each_round_counts_in_the_order_rounds_appeared():
    def row(cell: str, round_: int, attempt: int, repeat: int = 0) -> Record:
        return full_record(cell, round=round_, attempt=attempt, repeat=repeat)

    rows = [row("a", 1, 1), row("b", 1, 1), row("a", 2, 1), row("a", 1, 3), row("a", 1, 2), row("a", 1, 1, 1)]
    found = [(r["cell_id"], r["repeat"], r["round"], r["attempt"]) for r in last_attempts(rows)]
    assert found == [("a", 0, 1, 3), ("b", 0, 1, 1), ("a", 0, 2, 1), ("a", 1, 1, 1)]


def test_rows_of_an_older_folder_without_attempts_count_by_order():
    rows = [dict.fromkeys(COLUMNS) | {"cell_id": "a", "status": status} for status in ("failed", "ok")]
    assert [row["status"] for row in last_attempts(rows)] == ["ok"]


def test_results_have_one_row_per_round_with_the_cells_pooled_numbers():
    rows = result_rows([timed("a", 1, 2.0, 100), timed("a", 2, 2.1, 120), timed("a", 3, 1.9, 110), timed("b", 1, 0.5)])
    assert [(row["cell_id"], row["round"]) for row in rows] == [("a", 1), ("a", 2), ("a", 3), ("b", 1)]
    assert [list(row) for row in rows] == [list(RESULT_COLUMNS)] * 4
    pooled = [{name: row[name] for name in POOLED} for row in rows[:3]]
    assert pooled[0] == pooled[1] == pooled[2]
    assert pooled[0]["ms_per_step_pooled"] == 110
    assert pooled[0]["speedup_pooled"] == pytest.approx((2.0 * 2.1 * 1.9) ** (1 / 3))
    assert pooled[0]["speedup_pooled_ci_low"] < pooled[0]["speedup_pooled"] < pooled[0]["speedup_pooled_ci_high"]
    assert [row["verdict"] for row in rows] == ["faster"] * 3 + ["slower"]
    assert rows[3]["speedup_pooled_ci_low"] < 0.5 * 0.99  # one round: wider than within its process


def test_rounds_that_are_not_ok_have_rows_but_no_part_in_the_pool():
    bad = timed("a", 2, 9.0, 1.0, status="failed", reason="as something else")
    never = new_record(cell_id="b", round=1, repeat=0, attempt=1, status="unsupported", reason="no such kernel")
    first, second, third = result_rows([timed("a", 1, 2.0), bad, never])
    assert first["speedup_pooled"] == second["speedup_pooled"] == pytest.approx(2.0)
    assert second["ms_per_step_pooled"] == 100
    assert (second["status"], second["reason"]) == ("failed", "as something else")
    assert {third[name] for name in POOLED} == {None}
    assert third["reason"] == "no such kernel"


def test_a_later_attempt_replaces_an_earlier_one_in_the_pool():
    rows = result_rows([timed("a", 1, 5.0), timed("a", 1, 2.0, attempt=2)])
    assert len(rows) == 1
    assert rows[0]["speedup_pooled"] == pytest.approx(2.0)


def test_results_parquet_has_typed_columns_and_real_nulls(tmp_path: Path):
    path = tmp_path / "results.parquet"
    empty = new_record(cell_id="b", round=1, repeat=0, attempt=1, status="skipped")
    rows = result_rows([timed("a", 1, 2.0, reason="größer"), empty])
    write_results(path, rows)
    schema = pq.read_schema(path)
    arrow = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    assert {field.name: field.type for field in schema} == {n: arrow[k] for n, k in (COLUMNS | POOLED).items()}
    assert pq.read_table(path).to_pylist() == rows
    table = pd.read_parquet(path)
    assert table["verdict"].tolist()[0] == "faster"
    assert table["verdict"].isna().tolist() == [False, True]
    assert [file.name for file in tmp_path.iterdir()] == ["results.parquet"]


def test_a_sweep_without_rows_still_has_a_table(tmp_path: Path):
    write_results(tmp_path / "results.parquet", [])
    assert list(pd.read_parquet(tmp_path / "results.parquet").columns) == list(RESULT_COLUMNS)


def test_results_of_an_older_folder(tmp_path: Path):
    path = tmp_path / "records.jsonl"
    old = {"cell_id": "old", "status": "ok", "speedup_vs_control": 1.5, "ms_per_step": 10.0, "timed_steps": 40}
    path.write_text(json.dumps(old) + "\n")
    rows = result_rows(read_records(path))
    write_results(tmp_path / "results.parquet", rows)
    assert rows[0]["speedup_pooled"] == pytest.approx(1.5)
    assert pq.read_table(tmp_path / "results.parquet").num_rows == 1


def test_a_round_under_foreign_load_is_pooled_only_where_there_is_no_other():
    quiet, loaded = {"status": "ok", "flags": "few-steps"}, {"status": "ok", "flags": "few-steps,foreign-load"}
    broken = {"status": "failed", "flags": None}
    assert undisturbed([loaded, quiet, quiet, broken]) == [quiet, quiet]
    assert undisturbed([loaded, broken]) == [loaded]
    assert undisturbed([broken]) == []
