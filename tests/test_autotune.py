"""autotune: what the search asks for and finds, by itself and as a sweep of real processes."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_help import ONE_CPU, records, sweep, sweep_here

from tinydit_ray.config import from_mapping
from tinydit_ray.sweep.autotune import search_of, trace_line
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.options import options_from
from tinydit_ray.sweep.parser import parser
from tinydit_ray.sweep.plan import make_cells
from tinydit_ray.sweep.search import Point, Search

AXES = {"attention": ["manual", "sdpa", "upcast"], "precision": ["fp32", "bf16"], "compile": ["off", "on"],
        "optimizer": ["a", "b", "c"], "gelu": ["exact", "tanh"], "adaln": ["no", "yes"]}  # fmt: skip
POINTS = list(itertools.product(*AXES.values()))
FACTORS = {"sdpa": 1.02, "upcast": 0.99, "on": 1.1, "b": 1.03, "c": 1.05, "tanh": 1.04, "yes": 1.02}


def published(point: Point) -> float:
    """As seen on one CPU: 16-bit arithmetic pays with hand-written attention and not with SDPA."""
    pays = {"manual": 1.9, "sdpa": 1.2, "upcast": 1.7}[point[0]] if "bf16" in point else 1.0
    return pays * math.prod(FACTORS.get(word, 1.0) for word in point)


def drive(speed: Callable[[Point], float | None], rounds: int = 3, possible: list[Point] = POINTS) -> tuple[Any, Any]:
    """The search and its winner, with ``speed`` as what a timing would find."""
    search = Search(AXES, set(possible), POINTS[0], rounds)
    requests, answers = search.run(), None
    asked: list[tuple[Point, int]] = []
    try:
        request = next(requests)
        while True:
            asked += [(point, request.round) for point in request.points]
            answers = {point: speed(point) for point in request.points}
            request = requests.send(answers)
    except StopIteration as end:
        assert len(set(asked)) == len(asked), "a round was asked for twice"
        return search, end.value


def test_it_finds_the_best_of_the_full_product_with_a_fraction_of_its_cells():
    search, winner = drive(published)
    assert winner == max(POINTS, key=published)
    assert len(search.speedups) < len(POINTS) / 5


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.5, 2.0), min_size=14, max_size=14))
def test_switches_that_do_not_interact_are_found_exactly_up_to_the_tie(factors: list[float]):
    words = dict(zip([word for values in AXES.values() for word in values], factors, strict=True))

    def speed(point: Point) -> float:
        return math.prod(words[word] for word in point)

    _, winner = drive(speed)
    assert speed(winner) >= max(map(speed, POINTS)) / 1.005 ** len(AXES)


def test_with_noise_the_choice_is_within_the_noise_of_the_best():
    for seed in range(20):
        rng = random.Random(seed)
        _, winner = drive(lambda point: published(point) * math.exp(rng.gauss(0, 0.01)))  # noqa: B023
        assert published(winner) > 0.95 * max(map(published, POINTS))


def test_what_cannot_run_never_wins_and_stops_nothing():
    search, winner = drive(lambda point: None if "bf16" in point else published(point))
    assert winner == max((point for point in POINTS if "bf16" not in point), key=published)
    assert any(speed is None for speed in search.speedups.values())


def test_where_nothing_runs_there_is_no_winner():
    assert drive(lambda point: None)[1] is None


def test_points_that_the_grid_excludes_are_not_asked_for():
    possible = [point for point in POINTS if not ("sdpa" in point and "bf16" in point)]
    search, _ = drive(published, possible=possible)
    assert search.speedups.keys() <= set(possible)


def test_each_round_of_the_run_off_halves_the_field():
    search, winner = drive(published, rounds=4)
    field = [len(step["timed"]) for step in search.trace if step["what"].startswith("run-off")]
    assert field == [8, 4, 2]
    assert search.trace[-1]["kept"] == [search.named(winner)]


def test_a_trace_line_says_what_was_kept():
    search, _ = drive(published)
    line = next(trace_line(step) for step in search.trace if "compile" in step["what"])
    assert line == "pass 1: compile: on ×2.090 (others: off ×1.900)"


# --- on a grid --------------------------------------------------------------------------------------------


def space(*sets: str, rounds: int = 3) -> tuple[Any, Any]:
    args = parser("x", "").parse_args([word for text in sets for word in ("--set", text)])
    options = options_from(args, default_grid="published", command=[])
    options.rounds = rounds
    return options, make_cells(options, device="cpu", cpus=1, node_kind="k", data_digest="d")[0]


def test_the_search_starts_at_the_cell_nearest_to_the_control():
    _, cells = space("precision=bf16,fp32", "attention=sdpa,manual", "compile=default,off")
    search = search_of(cells, 3)
    assert search.named(search.start) == {"attention": "manual", "precision": "fp32", "compile": "off"}
    assert len(search.possible) == 8


@pytest.mark.parametrize(
    ("sets", "part"),
    [(("model=micro,tiny",), "model varies"), (("batch_size=8,16",), "batch_size varies"),
     (("sampler=eager,bf16",), "sampler varies"), (("attention=sdpa",), "one cell")],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_chosen_among_is_refused(sets: tuple[str, ...], part: str):
    from tinydit_ray.sweep.autotune import check_space

    with pytest.raises(UsageError, match=part):
        check_space(*space(*sets))


def test_one_round_is_refused():
    from tinydit_ray.sweep.autotune import check_space

    with pytest.raises(UsageError, match="--rounds 1: autotune needs at least 2"):
        check_space(*space("attention=sdpa,manual", rounds=1))


def check_tuned(folder: Path, out: str, possible: int) -> None:
    rows = records(folder)
    content = json.loads((folder / "autotune.json").read_text())
    assert content["possible_cells"] == possible
    assert content["timed_cells"] == len({row["cell_id"] for row in rows if row["status"] == "ok"})
    assert f"timed {content['timed_cells']} of {possible} possible cells" in out
    assert "run-off, round 2" in out
    assert all(row["status"] == "ok" for row in rows)
    last = [row for row in rows if row["round"] == 2]
    assert last
    assert all((row["velocity_mse"] is not None) == (row["round"] == 2) for row in rows)
    named = json.loads((folder / "sweep.json").read_text())["grid"]
    assert {cell["cell_id"] for cell in named["cells"]} == {row["cell_id"] for row in rows}
    if (folder / "best.yaml").exists():  # on a busy machine nothing may be proven faster
        chosen = from_mapping(yaml.load((folder / "best.yaml").read_text(), Loader=yaml.BaseLoader))
        assert chosen.config_id in {row["config_id"] for row in last}
        assert "train with it: python -m tinydit_ray.train --profile" in out


SMALL = ["--set", "model=64/1/2", "--set", "batch_size=16", "--data", "shapes", "--steps", "4", "--fd-n", "0",
         "--time", "0.9", "--rounds", "2", "--set", "precision=fp32,bf16"]  # fmt: skip


@pytest.mark.slow
def test_autotune_without_ray_and_again(tmp_path: Path) -> None:
    more = ["--set", "optimizer=adamw,adamw-fused", "--no-ray"]
    done = sweep("autotune.py", *SMALL, *ONE_CPU, *more, "--name", "t", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check_tuned(tmp_path / "runs" / "t", done.stdout, possible=4)
    count = len(records(tmp_path / "runs" / "t"))
    again = sweep("autotune.py", *SMALL, *ONE_CPU, *more, "--resume", "t", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(records(tmp_path / "runs" / "t")) == count, "everything was known already"


@pytest.mark.ray
def test_autotune_through_ray(tmp_path: Path) -> None:
    done = sweep("autotune.py", *SMALL, *ONE_CPU, "--name", "t", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check_tuned(tmp_path / "runs" / "t", done.stdout, possible=2)


def test_a_dry_run_counts_the_cells(tmp_path: Path) -> None:
    done = sweep_here("autotune.py", "--dry-run", "--data", "shapes", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2,304 possible cells" in done.stdout
    assert "nothing was run" in done.stdout
