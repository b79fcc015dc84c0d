"""What orchestration costs: all three paths really run, and the table says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_help import ONE_CPU, TINY, records, sweep


@pytest.mark.ray
@pytest.mark.slow
def test_each_path_runs_the_cell_in_a_process_that_no_cell_ran_in(tmp_path: Path) -> None:
    done = sweep("overhead.py", *TINY, *ONE_CPU, "--trials", "1", "--name", "cost", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = records(tmp_path / "runs" / "cost")
    paths = ["no-ray", "ray", "ray, worker group"]
    assert [row["cell_name"] for row in rows] == [name for name in paths for _ in range(2)]
    assert [row["status"] for row in rows] == ["ok"] * 6, [row["reason"] for row in rows]
    assert len({row["effective.pid"] for row in rows}) == 6
    text = (tmp_path / "runs" / "cost" / "summary.txt").read_text()
    assert all(name in text for name in (*paths, "around it", "queued", "start-up, once"))
    assert "above --no-ray" in done.stdout
