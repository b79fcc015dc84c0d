"""What lies on a disk is read back cut short, with a bit turned, or with other types in it: never a traceback, never
numbers that nobody measured. Rows are as they were written, or they are not there and it is said."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from analysis_help import make_grid_sweep, product
from fake_sweep import make_sweep
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from analysis.load import from_folder
from tinydit_ray.record import COLUMNS, SEAL, Record, append_record, damaged_lines, read_records
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.folder import SweepFolder
from tinydit_ray.sweep.ledger import Ledger
from tinydit_ray.sweep.options import options_from
from tinydit_ray.sweep.parser import parser
from tinydit_ray.sweep.progress import Progress
from tinydit_ray.sweep.results import result_rows, write_results
from tinydit_ray.sweep.resume import left_behind, parse, take_up
from tinydit_ray.sweep.table import summary_text
from tinydit_ray.tracking.split import run_of
from tinydit_ray.train.files import RunFolder
from tinydit_ray.train.options import TrainError
from tinydit_ray.train.trainer import Trainer

MANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEWER = settings(MANY, max_examples=80)


WRONG = st.one_of(
    st.booleans(), st.text(max_size=4), st.lists(st.integers(), max_size=2), st.just({}), st.just(1e999),
    st.floats(), st.integers(), st.just("ok"), st.just(2**70),
)  # fmt: skip
WRONG_JSON = WRONG.map(json.dumps).map(str.encode)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record], bytes]:
    folder = tmp_path_factory.mktemp("damage") / "s"
    made = make_sweep(folder, rounds=1)
    return folder, made, (folder / "records.jsonl").read_bytes()


# --- records ----------------------------------------------------------------------------------------------


@MANY
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_turned_bit_in_a_row_is_noticed(rows: Any, where: float, bit: int) -> None:
    folder, made, content = rows
    damaged = bytearray(content)
    damaged[int(where * len(content))] ^= 1 << bit
    path = folder / "records.jsonl"
    path.write_bytes(damaged)
    found = read_records(path)
    assert all(row in made for row in found)
    assert len(found) >= len(made) - 2  # a line end that is gone takes two with it
    assert damaged_lines(path) >= 1 or found == made


@FEWER
@given(start=st.floats(0, 1), end=st.floats(0, 1), junk=st.binary(max_size=30))
def test_a_piece_that_is_lost_or_overwritten_is_noticed(rows: Any, start: float, end: float, junk: bytes) -> None:
    folder, made, content = rows
    first, last = sorted((int(start * len(content)), int(end * len(content))))
    path = folder / "records.jsonl"
    path.write_bytes(content[:first] + junk + content[last:])
    assert all(row in made for row in read_records(path))


@pytest.mark.slow
@MANY
@given(changes=st.dictionaries(st.sampled_from(sorted(COLUMNS)), WRONG, min_size=1, max_size=3))
@example(changes={"round": "two"})
@example(changes={"ms_per_step": "fast"})
@example(changes={"attempt": 1.5})
@example(changes={"flags": ["few-steps"]})
@example(changes={"cell_id": {}})
@example(changes={"ms_per_step": -1.0, "speedup_vs_control": 0.0})
def test_a_row_of_other_types_is_no_row_and_one_that_is_read_can_be_used(rows: Any, changes: dict[str, Any]) -> None:
    """Edited by hand, so that no checksum speaks against it."""
    folder, made, _ = rows
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (made[0], {**made[1], **changes})))
    found = read_records(path)
    assert found[0] == made[0]
    for row in found:
        for name, kind in COLUMNS.items():
            assert row[name] is None or type(row[name]) is kind
    Ledger(found)
    table = result_rows(found)
    write_results(folder / "results.parquet", table)
    assert pq.read_table(folder / "results.parquet").num_rows == len(table)
    assert summary_text(table)
    for row in found:
        run_of(row, {})


def test_a_checksum_is_no_column_and_rows_without_one_are_of_older_folders(tmp_path: Path, rows: Any) -> None:
    _, made, _ = rows
    path = tmp_path / "records.jsonl"
    append_record(path, made[0])
    assert list(json.loads(path.read_text()))[-1] == SEAL
    assert list(read_records(path)[0]) == list(COLUMNS)
    path.write_text(json.dumps(made[0]) + "\n")
    assert read_records(path) == [made[0]]


def test_a_damaged_row_is_said_when_the_sweep_goes_on_and_its_round_is_taken_up_again(tmp_path: Path) -> None:
    made = make_sweep(tmp_path / "s", rounds=1)
    path = tmp_path / "s" / "records.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"ms_per_step": 7', b'"ms_per_step": 1', 1))
    content = json.loads((tmp_path / "s" / "sweep.json").read_text())
    now = {**content, "grid": {**content["grid"], "cells": [], "control": {}}}
    args = parse(parser("x", ""), ["--set", "seed=1", "--allow-changed", "--resume", "s", "--out", str(tmp_path)])
    options = options_from(args, default_grid="published", command=[])
    folder = SweepFolder.open(tmp_path, "s", resume=True)
    out = io.StringIO()
    take_up(folder, options, now, Console(file=out, width=200))
    folder.close()
    assert "1 damaged lines of records.jsonl are left out" in out.getvalue()
    again = folder.records()
    assert len(again) == len(made)  # the round's own record.json had it
    assert {row["cell_id"] for row in again} == {row["cell_id"] for row in made}


@FEWER
@given(content=st.one_of(st.binary(max_size=60), st.text(max_size=40).map(str.encode), WRONG_JSON))
def test_whatever_lies_in_a_rounds_folder_is_taken_up_or_left(rows: Any, content: bytes) -> None:
    folder, made, _ = rows
    paths = sorted(folder.glob("cells/*/*/record.json"))
    before = paths[0].read_bytes()
    paths[0].write_bytes(content)
    try:
        found = left_behind(folder, made[0]["sweep_id"], [])
        assert all(row in made for row in found)
        assert len(found) == len(made) - 1
    finally:
        paths[0].write_bytes(before)


# --- the files beside them --------------------------------------------------------------------------------


@FEWER
@given(content=st.one_of(st.binary(max_size=80), st.recursive(WRONG, lambda x: st.dictionaries(
    st.sampled_from(["total", "done", "left_s", "at", "working", "ended"]), x, max_size=6), max_leaves=8
).map(json.dumps).map(str.encode)))
def test_whatever_progress_json_holds_is_progress_or_none(content: bytes) -> None:
    found = Progress.from_json(content.decode(errors="replace"))
    if found is not None:
        assert found.age_s >= 0
        assert found.to_json()


@FEWER
@given(content=st.one_of(st.binary(max_size=80), WRONG_JSON, st.just(b"[" * 5000)))
def test_what_is_no_sweep_json_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    top = tmp_path_factory.getbasetemp() / "sweeps"
    (top / "s").mkdir(parents=True, exist_ok=True)
    (top / "s" / "sweep.json").write_bytes(content)
    folder = SweepFolder.open(top, "s", resume=True)
    with pytest.raises(UsageError) as refused:
        folder.read_sweep()
    folder.close()
    assert "\n" not in str(refused.value)
    if content != b"{}":  # which is an old sweep's, of which nothing is known
        with pytest.raises(UsageError):
            from_folder(top / "s")


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], bytes]:
    folder = tmp_path_factory.mktemp("pooled") / "s"
    make_grid_sweep(folder, product(precision=["fp32", "bf16"]), rounds=2)
    return folder, from_folder(folder).rows, (folder / "results.parquet").read_bytes()


@FEWER
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_damaged_results_are_made_anew_from_the_records(pooled: Any, where: float, bit: int, cut: bool) -> None:
    folder, expected, content = pooled
    damaged = bytearray(content)
    damaged[int(where * len(content))] ^= 1 << bit
    (folder / "results.parquet").write_bytes(damaged[: int(where * len(content))] if cut else damaged)
    found = from_folder(folder).rows
    assert len(found) == len(expected)
    for row, true in zip(found, expected, strict=True):
        for name, value in true.items():
            assert row[name] == (pytest.approx(value) if isinstance(value, float) else value), name


# --- checkpoints ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunFolder, dict[str, torch.Tensor], bytes]]:
    """Two of them: step 0, and step 1 with other weights."""
    with RunFolder(tmp_path_factory.mktemp("run")) as folder:
        net = nn.Linear(6, 6)
        trainer = Trainer(net, lambda model, batch: model(batch).square().mean())
        folder.save(trainer, {"dim": 6}, history={"losses": [1.0]})
        trainer.train_step(torch.ones(2, 6))
        folder.save(trainer, {"dim": 6}, history={"losses": [1.0, 0.5]})
        weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        yield folder, weights, folder.current.read_bytes()


def check_newest(folder: RunFolder, weights: dict[str, torch.Tensor]) -> None:
    """The newest checkpoint as it was saved, or the one before it and a word why, or a refusal."""
    path, state, note = folder.newest()
    assert path is not None
    if path == folder.current:
        assert (state["steps"], state["history"], note) == (1, {"losses": [1.0, 0.5]}, "")
        assert all(torch.equal(state["model"][name], tensor) for name, tensor in weights.items())
    else:
        assert state["steps"] == 0
        assert "falling back to checkpoint.prev.pt" in note
    (folder.path / "checkpoint.damaged.pt").unlink(missing_ok=True)


@MANY
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.integers(0, 5))
def test_a_damaged_checkpoint_is_never_taken_for_whole(checkpoints: Any, where: float, bit: int, cut: int) -> None:
    folder, weights, content = checkpoints
    damaged = bytearray(content)
    damaged[int(where * len(content))] ^= 1 << bit
    folder.current.write_bytes(damaged[: int(where * len(content))] if cut == 0 else damaged)
    check_newest(folder, weights)


@pytest.mark.parametrize("junk", [b"", b"PK", b"\x80\x04cos\nsystem\n(S'true'\ntR.", bytes(1000)])
def test_what_is_no_checkpoint_is_not_taken_for_one(checkpoints: Any, junk: bytes, tmp_path: Path) -> None:
    folder, weights, _ = checkpoints
    folder.current.write_bytes(junk)
    check_newest(folder, weights)
    shutil.copy(folder.previous, tmp_path / "kept.pt")
    folder.current.write_bytes(junk)
    folder.previous.write_bytes(junk)
    with pytest.raises(TrainError, match=r"checkpoint\.pt is damaged .*; checkpoint\.prev\.pt is damaged"):
        folder.newest()
    shutil.copy(tmp_path / "kept.pt", folder.previous)
