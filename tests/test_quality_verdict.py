"""The quality verdict: seeds of the control, the interval for one more, and what a sweep makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sweep_help import ONE_CPU, TINY, records, results, sweep, sweep_here

from tinydit_ray.bench.seeds import BETTER, NOT_JUDGED, WITHIN, WORSE, SeedSpread, seed_spread, worst
from tinydit_ray.config import from_mapping
from tinydit_ray.record import Record, new_record
from tinydit_ray.sweep.best import best_row, print_best, write_best
from tinydit_ray.sweep.options import options_from
from tinydit_ray.sweep.parser import parser
from tinydit_ray.sweep.plan import make_cells, make_rounds
from tinydit_ray.sweep.results import result_rows
from tinydit_ray.sweep.seeds import SEED_FLAG, after_first, is_seed_row, seed_rounds, verdict_lines
from tinydit_ray.sweep.summary import summary_rows
from tinydit_ray.sweep.table import summary_text


@pytest.mark.parametrize("n", [2, 3, 10])
def test_the_interval_is_the_textbook_one_for_one_new_observation(n: int):
    scores = np.random.default_rng(n).normal(0.3, 0.01, n)
    found = seed_spread(scores)
    assert found is not None
    # scipy's t distribution, centred on the mean and scaled by s·√(1 + 1/n)
    low, high = stats.t.interval(0.95, n - 1, scores.mean(), scores.std(ddof=1) * np.sqrt(1 + 1 / n))
    assert (found.low, found.high, found.seeds) == (pytest.approx(low), pytest.approx(high), n)


def test_another_seed_of_the_same_thing_is_outside_in_five_cases_of_a_hundred():
    draws = np.random.default_rng(0).normal(20, 2, (4000, 4))
    outside = [seed_spread(row[:3]).judge(row[3]) != WITHIN for row in draws]  # type: ignore[union-attr]
    assert 0.04 < np.mean(outside) < 0.06


def test_one_seed_shows_no_spread():
    assert seed_spread([0.3]) is None
    assert seed_spread([]) is None


def test_lower_is_better_and_the_ends_are_within():
    spread = SeedSpread(low=1.0, high=2.0, mean=1.5, seeds=3)
    assert [spread.judge(score) for score in (0.99, 1.0, 2.0, 2.01)] == [BETTER, WITHIN, WITHIN, WORSE]


def test_one_score_that_is_worse_decides():
    assert worst([BETTER, WORSE]) == WORSE
    assert worst([WITHIN, BETTER]) == BETTER
    assert worst([WITHIN, NOT_JUDGED]) == WITHIN
    assert worst([]) == NOT_JUDGED


# --- verdicts of rows -------------------------------------------------------------------------------------


def row_of(axes: dict[str, Any], mse: float, fd: float | None, **values: Any) -> Record:
    cell = from_mapping({"model": "micro", **axes})
    name = "-".join(map(str, axes.values())) or "control"
    return new_record(
        cell_id=f"{cell.config_id}{values.get('flags')}", cell_name=name, round=1, attempt=1, status="ok",
        velocity_mse=mse, probe_fd=fd, probe_id="p", probe_fd_n=250, steps_trained=100, **cell.columns(),
        **{"ms_per_step": 10.0, "speedup_vs_control": 2.0, "speedup_ci_low": 1.99, "speedup_ci_high": 2.01,
           "timed_steps": 60, **values},
    )  # fmt: skip


def seeds_of(axes: dict[str, Any] | None = None, mse: float = 0.3, fd: float = 20.0) -> list[Record]:
    """Three seeds of the control: 0.3 ± 0.001 is within 0.295 to 0.305, 20 ± 0.1 within 19.5 to 20.5."""
    untimed = {"ms_per_step": None, "speedup_vs_control": None, "flags": SEED_FLAG}
    return [
        row_of({**(axes or {}), "seed": 1 + i}, mse + d / 1000, fd + d / 10, **untimed)
        for i, d in enumerate((-1, 0, 1))
    ]


def verdicts(rows: list[Record]) -> dict[str, Any]:
    return {row["cell_name"]: row["quality_verdict"] for row in result_rows(rows) if not is_seed_row(row)}


def test_each_cell_is_held_against_the_control_s_seeds():
    cells = [
        row_of({}, 0.301, 20.1), row_of({"precision": "bf16"}, 0.310, 20.0), row_of({"attention": "sdpa"}, 0.29, 20.0),
        row_of({"attention": "sdpa", "precision": "bf16"}, 0.29, 21.0), row_of({"gelu": "tanh"}, 0.3, None),
    ]  # fmt: skip
    found = verdicts([*cells, *seeds_of()])
    assert found == {"control": WITHIN, "bf16": WORSE, "sdpa": BETTER, "sdpa-bf16": WORSE, "tanh": WITHIN}
    lines = verdict_lines(result_rows([*cells, *seeds_of()]))
    spread = "velocity MSE 0.295 – 0.305 (95 %, from 3 seeds, mean 0.3)"
    assert lines[0] == f"one more seed of the control would have {spread}"
    assert "bf16: worse: velocity MSE 0.31 (seeds 0.295 – 0.305)" in lines
    assert "sdpa-bf16: worse: probe-FD 21 (seeds 19.5 – 20.5)" in lines


def test_without_seeds_or_with_others_than_its_own_nothing_is_judged():
    cell = row_of({"precision": "bf16"}, 0.31, 21.0)
    assert verdicts([cell]) == {"bf16": NOT_JUDGED}
    assert verdicts([cell, *seeds_of()[:1]]) == {"bf16": NOT_JUDGED}
    for other in ({"dim": 128}, {"batch_size": 64}, {"lr": 1e-4}):
        assert verdicts([cell, *seeds_of(other)]) == {"bf16": NOT_JUDGED}
    longer = [{**row, "steps_trained": 200} for row in seeds_of()]
    assert verdicts([cell, *longer]) == {"bf16": NOT_JUDGED}


def test_a_probe_fd_of_another_probe_or_number_of_images_is_not_compared():
    cell = row_of({"precision": "bf16"}, 0.3, 30.0)
    assert verdicts([cell, *seeds_of()]) == {"bf16": WORSE}
    for change in ({"probe_id": "q"}, {"probe_fd_n": 500}):
        assert verdicts([cell, *({**row, **change} for row in seeds_of())]) == {"bf16": WITHIN}


def test_a_cell_that_failed_has_no_verdict_and_a_failed_seed_does_not_count():
    cell = {**row_of({"precision": "bf16"}, 0.31, 20.0), "status": "failed"}
    assert verdicts([cell, *seeds_of()]) == {"bf16": None}
    two = [*seeds_of()[:1], {**seeds_of()[1], "status": "failed", "velocity_mse": None}]
    assert verdicts([row_of({}, 0.31, 20.0), *two]) == {"control": NOT_JUDGED}


def test_a_sampler_is_judged_by_what_it_samples():
    sampled = {"sample_ms_per_image": 2.0, "sample_velocity_mse": 0.4, "ms_per_step": None}
    assert verdicts([row_of({"sampler": "bf16"}, 0.3, 20.0, **sampled), *seeds_of()]) == {"bf16": WORSE}


def test_seeds_are_no_rows_of_the_table_and_the_verdict_is():
    rows = result_rows([row_of({"precision": "bf16"}, 0.31, 20.0), *seeds_of()])
    assert [row["cell_name"] for row in summary_rows(rows)] == ["bf16"]
    text = summary_text(rows)
    assert "quality" in text
    assert "worse" in text


def test_what_is_worse_is_not_recommended_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from rich.console import Console

    slower = {"speedup_vs_control": 1.5, "speedup_ci_low": 1.49, "speedup_ci_high": 1.51}
    rounds = [{**row_of({"attention": "sdpa"}, 0.3, 20.0, **slower), "round": i} for i in (1, 2, 3)]
    worse = [{**row_of({"precision": "bf16"}, 0.31, 20.0), "round": i} for i in (1, 2, 3)]
    rows = result_rows([*rounds, *worse, *seeds_of()])
    best = write_best(tmp_path, rows, {})
    assert best is not None
    assert best.row["cell_name"] == "sdpa"
    assert "quality within the seed spread" in best.lines()[0]
    assert "quality within the seed spread" in best.path.read_text()
    assert best.lines()[-1].startswith("not recommended, since its quality is worse: bf16")
    alone = result_rows([*worse, *seeds_of()])
    assert best_row(alone) is None
    print_best(Console(width=200), None, alone)
    assert "at no worse quality" in (out := capsys.readouterr().out)
    assert "not recommended" in out


def test_the_report_neither_advises_what_is_worse_nor_keeps_it_quiet():
    from analysis.advice import advice
    from analysis.cells import cells_of

    rows = result_rows([{**row_of({"precision": "bf16"}, 0.31, 20.0), "round": i} for i in (1, 2, 3)] + seeds_of())
    cells = cells_of(rows)
    assert [(cell["name"], cell["quality"]) for cell in cells] == [("bf16", WORSE)]
    found = advice(cells)
    assert found["best"] is None
    words = dict(found["lines"])
    assert words["Faster, but worse in quality"].startswith("bf16 (")
    assert "Keep the control." in words


# --- the plan ---------------------------------------------------------------------------------------------


def plan(*arguments: str) -> tuple[Any, Any]:
    options = options_from(parser("x", "").parse_args(arguments), default_grid="published", command=[])
    cells, _ = make_cells(options, device="cpu", cpus=1, node_kind="k", data_digest="d")
    content = {"node_kind": "k", "data": {"digest": "d"}, "grid": {"seeds": options.seeds}}
    return cells, seed_rounds(cells, content)


def test_each_control_gets_its_own_seeds_and_none_is_a_cell_s():
    sets = ["--set", "model=micro,tiny", "--set", "precision=fp32,bf16", "--set", "seed=0,4"]
    cells, rounds = plan(*sets, "--seeds", "3")
    assert [(item.cell.config.model, item.cell.config.seed) for item in rounds] == [
        ("micro", 5), ("micro", 6), ("micro", 7), ("tiny", 5), ("tiny", 6), ("tiny", 7),
    ]  # fmt: skip
    assert {item.cell.config.precision for item in rounds} == {"fp32"}
    assert {item.cell.flags for item in rounds} == {SEED_FLAG}
    assert not {item.cell.cell_id for item in rounds} & {cell.cell_id for cell in cells}
    assert rounds[0].cell.name == "control micro seed=5"
    order = after_first(make_rounds(cells, 2, "s"), rounds)
    assert order[len(cells) : len(cells) + 6] == rounds
    assert plan("--set", "precision=fp32,bf16")[1] == []


@pytest.mark.slow
def test_a_sweep_with_seeds(tmp_path: Path) -> None:
    options = [*TINY, *ONE_CPU, "--no-ray", "--rounds", "1", "--seeds", "2", "--ema", "0.5", "--name", "s"]
    done = sweep("speed_grid.py", *options, "--set", "precision=fp32,bf16", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = records(tmp_path / "runs" / "s")
    cells, seeds = [r for r in rows if not is_seed_row(r)], [r for r in rows if is_seed_row(r)]
    assert [row["seed"] for row in seeds] == [1, 2]
    assert len({row["batch_hash"] for row in cells}) == 1
    assert len({row["batch_hash"] for row in rows}) == 3
    for row in seeds:
        assert (row["status"], row["ms_per_step"], row["effective.attention_op"]) == ("ok", None, "manual")
        assert row["velocity_mse"] > 0
        assert row["probe_fd"] > 0
    for row in rows:
        assert row["velocity_mse_ema"] > row["velocity_mse"], "the average lags behind"
        assert row["probe_fd_ema"] > 0
    assert "EMA" in done.stdout  # the heading may go over two lines
    table = results(tmp_path / "runs" / "s")
    judged = table[~table["flags"].fillna("").str.contains(SEED_FLAG)]
    assert set(judged["quality_verdict"]) <= {WORSE, BETTER, WITHIN}
    assert "one more seed of the control would have velocity MSE" in done.stdout
    again = sweep("speed_grid.py", *options[:-2], "--set", "precision=fp32,bf16", "--resume", "s", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(records(tmp_path / "runs" / "s")) == 4, "everything was known already"


def test_seeds_of_nothing_are_refused(tmp_path: Path) -> None:
    done = sweep_here("speed_grid.py", "--seeds", "3", "--steps", "0", "--data", "shapes", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: --seeds 3: nothing is trained with 0 steps; give --steps"
