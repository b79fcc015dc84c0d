"""best.yaml: which cell a sweep recommends, and that the training command takes it as it is."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tinydit_ray.config import CellConfig, from_mapping
from tinydit_ray.record import new_record
from tinydit_ray.sweep.best import BEST_FILE, best_row, profile_of, training_command, write_best
from tinydit_ray.train.options import parse

DATA = {"source": "shapes", "digest": "d", "spec": {"source": "shapes", "root": "", "classes": [], "digest": "d"}}
CONTENT = {"name": "my sweep", "data": DATA}


def row_of(speedup: float, cell: CellConfig | None = None, **values: Any) -> dict[str, Any]:
    cell = cell or from_mapping({"model": "micro"})
    pooled = {
        "speedup_pooled": speedup, "speedup_pooled_ci_low": speedup * 0.97, "speedup_pooled_ci_high": speedup * 1.03,
        "ms_per_step_pooled": 100 / speedup, "verdict": "faster", "quality_verdict": None,
    }  # fmt: skip
    identity = {"cell_id": cell.config_id, "cell_name": f"cell {speedup}", "round": 1, "status": "ok"}
    record = new_record(**identity, **cell.columns(), node_kind="a-machine", data_source="shapes")
    return {**record, **pooled, **values}


def cells(*speedups: float) -> list[dict[str, Any]]:
    return [row_of(speedup, from_mapping({"seed": i})) for i, speedup in enumerate(speedups)]


def test_the_highest_proven_speedup_wins():
    found = best_row(cells(1.2, 2.1, 1.9))
    assert found is not None
    assert found["speedup_pooled"] == 2.1


@pytest.mark.parametrize(
    "defect",
    [{"verdict": "within noise"}, {"verdict": "slower"}, {"verdict": "too noisy"}, {"verdict": None},
     {"quality_verdict": "worse"}, {"status": "failed"}, {"status": "unsupported"}, {"config.sampler": "bf16"},
     {"config.workers": 2}],
    ids=str,
)  # fmt: skip
def test_a_faster_cell_that_is_not_proven_or_not_as_good_does_not_win(defect: dict[str, Any]):
    rows = cells(1.2, 3.0)
    rows[1] |= defect
    found = best_row(rows)
    assert found is not None
    assert found["speedup_pooled"] == 1.2
    assert best_row(rows[1:]) is None


def test_one_failed_round_is_enough_against_a_cell_and_a_skipped_one_is_not():
    cell = from_mapping({"seed": 7})
    rounds = [row_of(2.0, cell), row_of(2.0, cell, round=2, status="failed")]
    assert best_row(rounds) is None
    rounds[1]["status"] = "skipped"
    assert best_row(rounds) is rounds[0]


def test_cells_that_were_skipped_in_every_round_are_no_candidates():
    skipped = {"status": "skipped", "verdict": None, "speedup_pooled": None, "speedup_pooled_ci_low": None}
    rows = [row_of(1.0, from_mapping({"seed": seed})) | skipped for seed in (1, 2)]
    assert best_row(rows) is None
    assert best_row([*rows, row_of(1.5)])["speedup_pooled"] == 1.5


@pytest.mark.parametrize("quality", ["not judged", "better", "within seed spread", None])
def test_quality_that_is_not_worse_does_not_stand_in_the_way(quality: str | None):
    assert best_row([row_of(1.5, quality_verdict=quality)]) is not None


def test_the_training_command_takes_the_profile_and_trains_that_very_cell(tmp_path: Path):
    axes = {"model": "micro", "precision": "bf16", "optimizer": "adamw-fused", "adaln": "merged", "lr": 1e-4}
    cell = from_mapping({**axes, "max_grad_norm": "off"})
    folder = tmp_path / "a folder's name"
    folder.mkdir()
    found = write_best(folder, [row_of(1.5, cell)], CONTENT)
    assert found is not None
    assert found.path == folder / BEST_FILE
    words = shlex.split(found.command)
    assert words[:3] == ["python", "-m", "tinydit_ray.train"]
    options = parse(words[3:])
    assert options.cell == cell
    assert options.data == "shapes"
    assert found.command in found.path.read_text().splitlines()[0]
    assert found.command in "\n".join(found.lines())


def test_a_sweep_without_a_winner_leaves_no_profile_of_an_earlier_session(tmp_path: Path):
    assert write_best(tmp_path, cells(1.5), CONTENT) is not None
    rows = cells(1.5)
    rows[0]["verdict"] = "within noise"
    assert write_best(tmp_path, rows, CONTENT) is None
    assert not (tmp_path / BEST_FILE).exists()


def test_rows_from_parquet_give_plain_values(tmp_path: Path):
    import pandas as pd

    pd.DataFrame(cells(1.5)).to_parquet(tmp_path / "r.parquet")
    rows = pd.read_parquet(tmp_path / "r.parquet").to_dict("records")
    assert profile_of(rows[0]) == from_mapping({"seed": 0}).asdict()
    assert all(type(value) in (str, int, float) for value in profile_of(rows[0]).values())


def test_the_command_names_the_data_and_its_classes():
    data = {"spec": {"source": "parquet", "root": "/data/my images", "classes": [1, 9]}}
    words = shlex.split(training_command("best.yaml", name="x", data=data))
    assert words[words.index("--data") + 1] == "/data/my images"
    assert words[words.index("--classes") + 1] == "1,9"
