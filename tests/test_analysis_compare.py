"""``analysis/compare.py``: two sweeps cell by cell, as a person's CI would run it."""

from __future__ import annotations

import io
import math

import pytest
from analysis_help import bf16_needs_compile, make_grid_sweep, product, script, script_here
from rich.console import Console

from analysis.compare import compare, gate
from analysis.load import load
from analysis.pairs import show
from tinydit_ray.sweep.errors import UsageError

CELLS = product(precision=["fp32", "bf16"], compile=["off", "default"])


def slower_when_compiled(config):
    return bf16_needs_compile(config) * (0.9 if config.compile != "off" else 1.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Yesterday; today (compiled cells 11 % slower, SDPA new, one cell gone, one broken)."""
    top = tmp_path_factory.mktemp("compare")
    today = [*CELLS[1:], {"attention": "sdpa"}]

    def broken(record):
        if record["config.precision"] == "bf16" and record["config.compile"] == "off":
            return {"status": "failed", "reason": "it broke", "ms_per_step": None, "speedup_vs_control": None}
        return {}

    make_grid_sweep(top / "yesterday", CELLS)
    make_grid_sweep(top / "again", CELLS, speed=lambda config: bf16_needs_compile(config) * 1.001)
    make_grid_sweep(top / "today", today, speed=slower_when_compiled, change=broken)
    return top


def words(top, before, after, **options):
    pairs = compare(load([top / before])[0], load([top / after])[0], **options)
    return {pair.name: pair.word for pair in pairs}


def test_each_cell_has_its_word(made):
    assert words(made, "yesterday", "today") == {
        "manual fp32 compile=default": "slower", "manual bf16 compile=off": "broken",
        "manual bf16 compile=default": "slower", "sdpa fp32 compile=off": "new", "fp32 compile=off": "gone",
    }  # fmt: skip
    assert set(words(made, "yesterday", "again").values()) == {"within noise"}
    assert words(made, "again", "yesterday", by="ms").keys() == words(made, "again", "yesterday").keys()


def test_the_interval_of_a_change_holds_the_truth(made):
    pairs = compare(load([made / "yesterday"])[0], load([made / "today"])[0])
    slow = [pair.change for pair in pairs if pair.word == "slower"]
    assert len(slow) == 2
    assert all(change.ci_low < 0.9 < change.ci_high < 1 for change in slow)
    # of two independent means of three rounds: as wide as both intervals in squares
    for pair in pairs:
        if pair.change:
            together = math.hypot(pair.before.pooled.se_log, pair.after.pooled.se_log)
            assert pair.change.se_log == pytest.approx(together)


@pytest.mark.slow
def test_the_command_exits_1_for_a_slowdown_and_names_it(made):
    done = script("compare.py", "yesterday", "today", "--fail-slower", "0.05", cwd=made)
    assert done.returncode == 1
    assert "slower by" in done.stderr
    assert "broken: manual bf16 compile=off (failed)" in done.stderr
    assert "gone, only in A: fp32 compile=off" in done.stdout
    assert script_here("compare.py", "yesterday", "today", cwd=made).returncode == 0
    assert script_here("compare.py", "yesterday", "again", "--fail-slower", "0.05", cwd=made).returncode == 0


@pytest.mark.parametrize("width", [80, 120, 200])
def test_names_and_verdicts_are_whole_in_every_terminal(made, width):
    out = io.StringIO()
    before, after = (load([made / name])[0] for name in ("yesterday", "again"))
    pairs = compare(before, after)
    show(Console(file=out, width=width, highlight=False), before, after, pairs, "speedup")
    lines = out.getvalue().splitlines()
    for pair in pairs:
        assert [line for line in lines if pair.name in line and "within noise" in line], out.getvalue()
        assert f"{pair.change.ci_low:.3f} – {pair.change.ci_high:.3f}" in out.getvalue()
    assert ("a wider terminal shows them" in " ".join(out.getvalue().split())) is (width < 120)


def test_a_slowdown_below_the_share_passes(made):
    pairs = compare(load([made / "yesterday"])[0], load([made / "today"])[0])
    unbroken = [pair for pair in pairs if pair.word != "broken"]
    assert (gate(unbroken, 0.05), gate(unbroken, 0.3)) == (1, 0)


@pytest.mark.parametrize(
    ("what", "changed", "judged"),
    [
        ("data", {"data_digest": "sha256:other"}, False),
        ("threads", {"effective.threads": 4, "config.cpus_per_worker": 4}, False),
        ("versions", {"effective.torch": "3.0.0"}, True),
        ("machine", {"node_kind": "another"}, True),
        ("probe", {"probe_id": "another"}, True),
    ],
)
def test_what_differs_around_a_cell_is_named_and_kept_apart(made, tmp_path, what, changed, judged):
    def change(record):
        return changed if record["config.compile"] == "off" and (what != "probe" or record["probe_id"]) else {}

    make_grid_sweep(tmp_path / "other", CELLS, change=change)
    old, new = load([made / "yesterday"])[0], load([tmp_path / "other"])[0]
    # another node kind in one sweep makes its cells others; alone it is a difference
    if what == "machine":
        make_grid_sweep(tmp_path / "whole", CELLS, change=lambda record: changed)
        new = load([tmp_path / "whole"])[0]
    found = [pair for pair in compare(old, new) if pair.differs]
    assert {pair.differs for pair in found} == {(what,)}
    assert len(found) == (4 if what == "machine" else 2)
    assert all((pair.word != "not judged") is judged for pair in found)
    if not judged:
        assert all(pair.word == "within noise" for pair in compare(old, new, across=[what]))


def test_differences_are_printed_and_a_gate_that_sees_nothing_is_shut(made, tmp_path):
    make_grid_sweep(tmp_path / "other", CELLS, change=lambda record: {"data_source": "folder"})
    done = script_here("compare.py", str(made / "yesterday"), "other", "--fail-slower", "0.05", cwd=tmp_path)
    assert done.returncode == 2
    assert "data differ: data_source shapes" in done.stdout
    assert done.stderr.strip() == "--fail-slower 0.05: not one cell of A and B could be judged"
    with pytest.raises(UsageError, match="not one cell"):
        gate([], 0.05)


@pytest.mark.parametrize(
    "arguments",
    [("yesterday", "nowhere"), ("yesterday", "."), ("yesterday", "again", "--across", "moon"),
     ("yesterday", "again", "--fail-slower", "5")],
)  # fmt: skip
def test_bad_usage_is_one_line_and_exit_2(made, arguments):
    done = script_here("compare.py", *arguments, cwd=made)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()[-1]) > 20
    assert "Traceback" not in done.stderr


@pytest.mark.mlflow
def test_a_sweep_in_mlflow_against_its_own_folder(made, tmp_path):
    from analysis_help import track

    uri = f"sqlite:///{tmp_path / 'store.db'}"
    track(made / "yesterday", uri)
    pairs = compare(load([made / "yesterday"])[0], load(["yesterday"], uri)[0])
    assert {pair.word for pair in pairs} == {"within noise"}
    assert all(abs(pair.change.value - 1) < 1e-6 for pair in pairs)
