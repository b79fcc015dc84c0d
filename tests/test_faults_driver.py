"""One sweep through Ray to which everything happens that can happen to its driver, session after session: its Ray dies
under it, it is killed, its disk is full, it is interrupted. What was finished stays, and the end is that of a sweep to
which nothing happened.

``TINYDIT_KILLS=10 pytest -s tests/test_faults_driver.py`` kills it ten times in a row instead of once.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from disk_help import fill, mounted, small_disk
from driver_help import attempts, check_whole, descendants, driver, planned, wait_for, wait_until_ended
from sweep_help import ONE_CPU, TINY, records
from tracking_help import children, parents, runs_in

pytestmark = [pytest.mark.ray, pytest.mark.mlflow, pytest.mark.slow]

KILLS = int(os.environ.get("TINYDIT_KILLS", "1"))
ROUNDS = (KILLS + 4) // 3  # of each of three cells: a session that is killed may end one
GRID = [*TINY, *ONE_CPU, "--set", "attention=manual,sdpa,sdpa-math", "--rounds", str(ROUNDS)]
NAME = "hard-times"


@dataclass
class Session:
    """What one driver left: its exit, what it printed, the rows before and after, what its run in MLflow says."""

    status: int
    out: str
    err: str
    before: list[dict[str, Any]]
    after: list[dict[str, Any]]
    seconds: float
    run: list[tuple[str, bool]] = field(default_factory=list)  # status of the sweep's run, and whether it has ended
    sent: int = 0  # its children

    @property
    def line(self) -> str:
        """The one line on stderr."""
        (line,) = self.err.strip().splitlines()
        return line


Fault = Callable[["subprocess.Popen[str]", dict[int, str]], None]


class HardTimes:
    """A sweep, gone on with as often as it is asked to."""

    def __init__(self, here: Path, out: Path) -> None:
        self.here, self.out, self.folder = here, out, out / NAME
        self.uri = f"sqlite:///{here}/mlflow.db"

    def session(self, fault: Fault, *, after: int = 0, wait_s: float | None = None) -> Session:
        """Start or resume the driver; ``fault`` strikes when ``after`` more rounds have ended and another one has
        begun, or ``wait_s`` seconds after the start."""
        begun, before = attempts(self.folder), self._rows()
        options = ["--resume", NAME] if (self.folder / "sweep.json").exists() else [*GRID, "--name", NAME]
        start = time.monotonic()
        with driver(*options, "--out", str(self.out), cwd=self.here) as process:
            if wait_s is None:
                wait_for("trial", lambda: self._stands_at(before, begun, after), process)
            else:
                time.sleep(wait_s)
            seconds = time.monotonic() - start
            assert process.poll() is None, process.communicate()
            below = descendants(process.pid)
            fault(process, below)
            out, err = process.communicate(timeout=300)
        # without their head Ray's own agents take a minute to notice; no trial may stay
        wait_until_ended({pid: name for pid, name in below.items() if "Agent" not in name})
        found = Session(process.returncode, out, err, before, self._rows(), seconds)
        runs = runs_in(self.uri, "tinydit")
        found.run = [(run.info.status, bool(run.info.end_time)) for run in parents(runs)]
        found.sent = len(children(runs))
        return found

    def _stands_at(self, before: list[Any], begun: int, after: int) -> bool:
        return len(self._rows()) >= len(before) + after and attempts(self.folder) > begun + after

    def _rows(self) -> list[dict[str, Any]]:
        return records(self.folder) if (self.folder / "records.jsonl").exists() else []


def kill_part(part: str) -> Fault:
    def fault(process: subprocess.Popen[str], below: dict[int, str]) -> None:
        (pid,) = [pid for pid, name in below.items() if Path(name).name == part]
        os.kill(pid, signal.SIGKILL)

    return fault


def kill(process: subprocess.Popen[str], below: dict[int, str]) -> None:
    process.kill()


def interrupt(process: subprocess.Popen[str], below: dict[int, str]) -> None:
    process.send_signal(signal.SIGINT)


def nothing(process: subprocess.Popen[str], below: dict[int, str]) -> None:
    """The session that ends the sweep."""


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Session]]:
    """The sessions of one sweep, in this order, by what happened in them."""
    here = tmp_path_factory.mktemp("hard")
    with small_disk(here / "runs", 24) as disk:
        times = HardTimes(here, here / "runs")
        found = {"gcs_server": times.session(kill_part("gcs_server"), after=1)}
        found["raylet"] = times.session(kill_part("raylet"))
        for number in range(KILLS):
            found[f"kill {number}"] = killed_at_random(times, found["raylet"].seconds)
        if disk:
            found["disk"] = times.session(lambda process, below: fill(disk))
            (disk / "filler").unlink()
        found["ctrl-c"] = times.session(interrupt)
        found["end"] = times.session(nothing)
        check_whole(times.folder, times.uri, planned(*GRID, cwd=here), ROUNDS)
        yield found


def killed_at_random(times: HardTimes, start_s: float) -> Session:
    """In the start, which takes ``start_s``, or in a trial."""
    wait_s = random.uniform(0.0, start_s + 4.0)
    found = times.session(kill, wait_s=wait_s)
    print(f"SIGKILL {wait_s:.1f} s after the start: {len(found.before)} rows before, {len(found.after)} after")
    return found


def test_each_session_keeps_the_rows_of_those_before_it_and_adds_good_ones(past: dict[str, Session]) -> None:
    rows: list[dict[str, Any]] = []
    for what, session in past.items():
        assert session.before == rows, what
        assert session.after[: len(rows)] == rows, what
        assert {row["status"] for row in session.after} <= {"ok"}, what
        rows = session.after
    assert past["gcs_server"].after  # there was something to lose from the start


@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_a_ray_that_dies_ends_the_sweep_in_one_line(past: dict[str, Session], part: str) -> None:
    session = past[part]
    assert session.status == 3, session.out + session.err
    assert session.line.startswith("error: Ray")
    assert f"--resume {NAME}" in session.line


def test_a_driver_killed_at_random_is_gone_on_with(past: dict[str, Session]) -> None:
    """The rows, the end and the processes that stay are looked at for all sessions alike."""
    assert [past[f"kill {number}"].status for number in range(KILLS)] == [-signal.SIGKILL] * KILLS


def test_a_full_disk_ends_the_sweep_in_one_line(past: dict[str, Session]) -> None:
    mounted(Path("/") if "disk" in past else None)
    session = past["disk"]
    assert session.status == 3, session.out + session.err
    assert "No space left on device" in session.line
    assert session.line.startswith("error: ")
    assert session.line.endswith(f"go on with --resume {NAME}")
    assert "Traceback" not in session.out


def test_ctrl_c_writes_what_is_done_and_ends_its_run(past: dict[str, Session]) -> None:
    session = past["ctrl-c"]
    assert session.status == 130, session.out + session.err
    assert "once more to leave at once" in session.err
    assert "Traceback" not in session.out + session.err
    assert "sweep folder:" in session.out  # the table of what is done, and where it lies
    assert session.run == [("KILLED", True)]
    assert session.sent == len(session.after)  # what others could not send any more is sent by now


def test_the_end_is_that_of_a_sweep_to_which_nothing_happened(past: dict[str, Session]) -> None:
    session = past["end"]
    assert session.status == 0, session.out + session.err
    assert session.run == [("FINISHED", True)]
    assert session.sent == len(session.after) == 3 * ROUNDS
