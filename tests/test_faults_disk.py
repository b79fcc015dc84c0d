"""The disk (a tmpfs of a few MB) is full while records are written: what is finished stays, one line says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from driver_help import attempts, driver, wait_for
from fake_sweep import record_of
from sweep_help import ONE_CPU, TINY, records, sweep

from tinydit_ray.config import from_mapping
from tinydit_ray.record import Record, append_record, read_records

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can mount a small file system"
)


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> Path:
    """Write a file until nothing more fits."""
    filler = path / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass
    return filler


def append_often(path: Path, row: Record) -> None:
    for _ in range(1000):
        append_record(path, row)


def test_a_row_that_the_disk_does_not_take_leaves_the_rows_before_it_whole(tmp_path: Path) -> None:
    row = record_of(from_mapping({}), sweep_id="s")
    with small_disk(tmp_path / "disk", 1) as disk:
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
    grid = [*TINY, *ONE_CPU, "--fd-n", "0", "--set", "attention=manual,sdpa", "--rounds", "1"]
    grid += ["--no-ray"]
    with small_disk(tmp_path / "disk", 16) as disk:
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
