"""``analysis/compare.py`` on two real sweeps of a net whose code became slower in between, as a user's CI sees it."""

from __future__ import annotations

import os

import pytest
from analysis_help import script, script_here
from sweep_help import ONE_CPU, ROOT, records, sweep

pytestmark = pytest.mark.slow

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x, t):
        x = self.first(x) + t[:, None, None, None]
        for _ in range({repeats}):
            x = self.middle(x).tanh()
        return self.last(x)

def net():
    return Net()
"""
ASKED = ["--model", "my_net:net", "--set", "precision=fp32", "--set", "batch_size=32", "--data", "shapes",
         "--steps", "0", "--fd-n", "0", "--time", "2", "--rounds", "3", "--no-ray", *ONE_CPU]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of both sweeps, and what Monday's printed, for which matplotlib was not to be had."""
    top, printed = tmp_path_factory.mktemp("real pair"), ""
    (top / "hidden" / "matplotlib").mkdir(parents=True)
    (top / "hidden" / "matplotlib" / "__init__.py").write_text("raise ImportError('no', name='matplotlib')")
    for name, repeats in (("monday", 1), ("tuesday", 24)):
        place = top / name
        place.mkdir()
        (place / "my_net.py").write_text(NET.replace("{repeats}", str(repeats)))
        hidden = {"PYTHONPATH": os.pathsep.join((str(top / "hidden"), str(ROOT)))}
        extra, env = ((), hidden) if name == "monday" else (("--no-report",), {})
        done = sweep("speed_grid.py", *ASKED, *extra, "--name", name, "--out", str(top / "runs"), cwd=place, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        printed = printed or done.stdout
    return top, printed


@pytest.fixture(scope="module")
def top(made):
    return made[0]


def test_a_report_that_fails_harms_no_sweep(made):
    """It ends as without a report, and says why there is none."""
    top, printed = made
    assert "no report was written (matplotlib is missing: pip install 'tinydit-ray[report]')" in printed
    assert not (top / "runs" / "monday" / "report.html").exists()
    assert (top / "runs" / "monday" / "summary.md").exists()


def test_a_net_that_became_slower_fails_the_gate_and_is_named(top):
    """Its control became slower with it, so the times are compared, not the speed-ups."""
    done = script("compare.py", "runs/monday", "runs/tuesday", "--by", "ms", "--fail-slower", "0.05", cwd=top)
    assert done.returncode == 1, done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("slower by ")
    assert "1 slower" in done.stdout
    before, after = (
        {row["cell_name"]: row["ms_per_step"] for row in records(top / "runs" / name) if row["round"] == 1}
        for name in ("monday", "tuesday")
    )
    assert all(after[name] > 1.5 * before[name] for name in before)


def test_the_other_way_round_passes_and_is_faster(top):
    done = script_here("compare.py", "runs/tuesday", "runs/monday", "--by", "ms", "--fail-slower", "0.05", cwd=top)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 faster" in done.stdout
