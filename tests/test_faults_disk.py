"""The disk (a tmpfs of a few MB) is full while records are written: what is finished stays, one line says so.

Through Ray it is one of the sessions of test_faults_driver.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_help import fill, mounted, small_disk
from driver_help import attempts, driver, wait_for
from fake_sweep import record_of
from sweep_help import ONE_CPU, TINY, records, sweep

from tinydit_ray.config import from_mapping
from tinydit_ray.record import Record, append_record, read_records


def append_often(path: Path, row: Record) -> None:
    for _ in range(1000):
        append_record(path, row)


def test_a_row_that_the_disk_does_not_take_leaves_the_rows_before_it_whole(tmp_path: Path) -> None:
    row = record_of(from_mapping({}), sweep_id="s")
    with small_disk(tmp_path / "disk", 1) as found:
        disk = mounted(found)
        path = disk / "records.jsonl"
        append_record(path, row)
        filler = fill(disk)
        with pytest.raises(OSError, match=r"No space left on device.*records\.jsonl"):
            append_often(path, row)  # what is left of the file's last page takes a few
        kept = path.read_bytes()
        assert kept.endswith(b"}\n")
        assert set(map(str, read_records(path))) == {str(row)}
        filler.unlink()
        append_record(path, row)
        assert path.read_bytes()[: len(kept)] == kept
        assert read_records(path)[-1] == row


@pytest.mark.slow
def test_a_full_disk_ends_the_sweep_in_one_line_and_it_goes_on_later(tmp_path: Path) -> None:
    grid = [*TINY, *ONE_CPU, "--fd-n", "0", "--set", "attention=manual,sdpa", "--rounds", "1", "--no-ray"]
    with small_disk(tmp_path / "disk", 16) as found:
        disk = mounted(found)
        folder = disk / "full"
        with driver(*grid, "--name", "full", "--out", str(disk), cwd=tmp_path) as process:
            wait_for("record", lambda: folder.joinpath("records.jsonl").exists() and attempts(folder) > 1, process)
            filler = fill(disk)
            out, err = process.communicate(timeout=120)
        assert process.returncode == 3, out + err
        (line,) = err.strip().splitlines()
        assert line.startswith("error: ")
        assert "No space left on device" in line
        assert line.endswith("go on with --resume full")
        assert "Traceback" not in out
        kept = records(folder)
        assert [row["status"] for row in kept] == ["ok"]
        filler.unlink()
        done = sweep("speed_grid.py", "--resume", "full", "--out", str(disk), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert records(folder)[0] == kept[0]
        assert sorted(row["status"] for row in records(folder)) == ["ok", "ok"]
