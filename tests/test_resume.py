"""Going on with a sweep: which options hold, what may not have changed, what a killed driver left. No trial runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_sweep import make_sweep
from sweep_help import ROOT

from tinydit_ray.record import add_flags, read_records
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.folder import SweepFolder
from tinydit_ray.sweep.options import options_from
from tinydit_ray.sweep.parser import parser
from tinydit_ray.sweep.resume import check_unchanged, left_behind, parse


def started_with(out: Path, *arguments: str) -> None:
    """A sweep.json as a sweep with these arguments leaves it."""
    args = parse(parser("x", ""), arguments)
    (out / "mine").mkdir(parents=True, exist_ok=True)
    (out / "mine" / "sweep.json").write_text(json.dumps({"options": args.given}))


def resumed(out: Path, *arguments: str) -> Any:
    args = parse(parser("x", ""), ["--resume", "mine", "--out", str(out), *arguments])
    return options_from(args, default_grid="published", command=["speed-grid"])


def test_options_that_are_not_given_stay_as_they_were(tmp_path: Path) -> None:
    started_with(
        tmp_path, "--set", "attention=manual,sdpa", "--rounds", "2", "--time", "5", "--no-ray", "--name", "mine"
    )
    options = resumed(tmp_path, "--time", "9")
    assert options.sets == {"attention": ["manual", "sdpa"]}
    assert (options.rounds, options.time_s, options.ray) == (2, 9.0, False)
    assert (options.name, options.resume, options.out) == ("mine", True, tmp_path)


def test_a_grid_given_anew_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    started_with(tmp_path, "--set", "attention=manual", "--set", "precision=bf16", "--rounds", "2")
    options = resumed(tmp_path, "--set", "attention=sdpa")
    assert (options.sets, options.rounds) == ({"attention": ["sdpa"]}, 2)


def test_a_sweep_of_a_cluster_can_go_on_without_ray(tmp_path: Path) -> None:
    more = ["--address", "192.0.2.1:6379", "--concurrent", "2", "--max-failures", "1", "--wait-nodes", "5m"]
    started_with(tmp_path, "--set", "workers=2", *more)
    options = resumed(tmp_path, "--no-ray")
    assert (options.ray, options.address, options.concurrent, options.max_failures) == (False, None, None, 0)
    assert options.sets == {"workers": [2]}
    assert resumed(tmp_path).address == "192.0.2.1:6379"


def test_a_resumed_sweep_can_be_resumed(tmp_path: Path) -> None:
    started_with(tmp_path, "--set", "seed=1", "--rounds", "2")
    started_with(tmp_path, "--resume", "mine", "--out", str(tmp_path), "--time", "7")
    options = resumed(tmp_path)
    assert (options.sets, options.rounds, options.time_s) == ({"seed": [1]}, 2, 7.0)


def now(**changes: Any) -> dict[str, Any]:
    """What the records of ``make_sweep`` were measured with."""
    digest = "sha256:0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d"
    content = {
        "product_version": "0.1.0", "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "data": {"digest": digest}, "versions": {"torch": "2.9.0"}, "grid": {"control": {}, "steps": 100},
    }  # fmt: skip
    return {**content, **changes}


CHANGES = {
    "version": {"product_version": "0.2.0"},
    "commit": {"git_commit": "fedcba"},
    "data": {"data": {"digest": "sha256:other"}},
    "control": {"grid": {"control": {"precision": "bf16"}, "steps": 100}},
    "steps": {"grid": {"control": {}, "steps": 200}},
}


@pytest.mark.parametrize("word", CHANGES)
def test_what_changed_is_refused_and_named_or_flagged(word: str, tmp_path: Path) -> None:
    records = make_sweep(tmp_path / "s", rounds=1)
    assert check_unchanged("s", records, now(), now(), allow=False) == []
    changed = now(**CHANGES[word])
    with pytest.raises(UsageError, match=f"{word} .* → .*--allow-changed"):
        check_unchanged("s", records, now(), changed, allow=False)
    assert check_unchanged("s", records, now(), changed, allow=True) == [f"changed-{word}"]
    unfinished = [{**row, "status": "failed"} for row in records]
    assert check_unchanged("s", unfinished, now(), changed, allow=False) == []  # nothing that would be mixed


def test_another_script_s_sweep_is_refused() -> None:
    with pytest.raises(UsageError, match="a sweep of null-check, not of autotune"):
        check_unchanged("s", [], now(command=["null-check"]), now(command=["autotune"]), allow=True)


def test_flags_are_added_once() -> None:
    record: dict[str, Any] = {"flags": "few-steps"}
    add_flags(record, ["changed-data", "few-steps"])
    assert record["flags"] == "few-steps,changed-data"
    empty: dict[str, Any] = {"flags": None}
    add_flags(empty, [])
    assert empty["flags"] is None


def test_rounds_that_ended_while_the_driver_was_killed_are_found_in_their_folders(tmp_path: Path) -> None:
    records = make_sweep(tmp_path, rounds=1)
    found = left_behind(tmp_path, records[0]["sweep_id"], records[2:])
    assert sorted(row["cell_id"] for row in found) == sorted(row["cell_id"] for row in records[:2])
    assert left_behind(tmp_path, "another", records[2:]) == []
    for path in tmp_path.glob("cells/*/*/record.json"):
        path.write_text('{"cell_id": [1], "torn')
    assert left_behind(tmp_path, records[0]["sweep_id"], records[2:]) == []


def test_passwords_are_masked_in_sweep_json(tmp_path: Path) -> None:
    folder = SweepFolder.open(tmp_path, "s", resume=False)
    uri = "http://ann:s3cret@host:5000"
    folder.write_sweep({"command": ["--tracking-uri", uri], "options": {"tracking_uri": uri}})
    folder.close()
    text = (tmp_path / "s" / "sweep.json").read_text()
    assert "s3cret" not in text
    assert "ann:***@host" in text


def test_two_with_the_same_name_are_one_too_many(tmp_path: Path) -> None:
    first = SweepFolder.open(tmp_path, "s", resume=False)
    with pytest.raises(UsageError, match="another process runs this sweep"):
        SweepFolder.open(tmp_path, "s", resume=False)
    first.close()
    SweepFolder.open(tmp_path, "s", resume=False).close()  # nothing was begun in it
    (tmp_path / "s" / "sweep.json").write_text("{ torn")
    with pytest.raises(UsageError, match="holds a sweep already"):
        SweepFolder.open(tmp_path, "s", resume=False)
    damaged = SweepFolder.open(tmp_path, "s", resume=True)
    with pytest.raises(UsageError, match="is damaged"):
        damaged.read_sweep()
    damaged.close()


BAD_NAMES = ("../evil", "/etc/evil", "a/b", "a\0b", "n" * 300, ".hidden", "", "a\\b", "ü" * 61, "a\nb")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_a_path_is_refused_before_anything_is_made(name: str, tmp_path: Path) -> None:
    for resume in (False, True):
        with pytest.raises(UsageError, match="plain folder name"):
            SweepFolder.open(tmp_path, name, resume=resume)
    assert not list(tmp_path.iterdir())


INTERRUPTED = """
import os, signal, sys, time
from pathlib import Path
from tinydit_ray.sweep.interrupt import Interrupts

me, out = os.getpid(), Path(sys.argv[1])
with Interrupts().listening() as interrupts:
    try:
        with interrupts.shield():
            os.kill(me, getattr(signal, sys.argv[2]))
            time.sleep(0.1)
            out.write_text("whole")
        print("not reached")
    except KeyboardInterrupt:
        if len(sys.argv) > 3:
            os.kill(me, signal.SIGINT)
            time.sleep(60)
            print("not reached")
        sys.exit(7)
"""


@pytest.mark.parametrize(("words", "status"), [(["SIGINT"], 7), (["SIGTERM"], 7), (["SIGINT", "again"], 130)])
def test_the_first_signal_lets_a_write_end_and_a_second_one_leaves_at_once(
    words: list[str], status: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "x"), *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert (tmp_path / "x").read_text() == "whole"
    assert "not reached" not in done.stdout
    assert "once more to leave at once" in done.stderr


def test_a_record_is_whole_after_a_torn_line(tmp_path: Path) -> None:
    records = make_sweep(tmp_path / "s", rounds=1)
    path = tmp_path / "s" / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert len(read_records(path)) == len(records) - 1


def test_a_commit_with_changes_is_not_the_commit(tmp_path: Path) -> None:
    records = make_sweep(tmp_path / "s", rounds=1)
    before = {**now(), "command": ["speed-grid"]}
    after = {**before, "git_commit": str(before["git_commit"]) + "+dirty"}
    with pytest.raises(UsageError, match=r"commit .* → .*\+dirty"):
        check_unchanged("s", records, before, after, allow=False)
