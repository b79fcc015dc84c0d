"""Averaged weights in a trial: scored beside the raw ones, through compiled steps and skipped ones alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sweep_help import ONE_CPU, TINY, sweep_here

from tinydit_ray import data
from tinydit_ray.cell import CellTask, Phases, blank_record
from tinydit_ray.config import from_mapping
from tinydit_ray.measure_training import SCORED_IMAGES, TrainedCell
from tinydit_ray.quality import velocity_mse
from tinydit_ray.train import trainer_of
from tinydit_ray.train.ema import plain_model

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, DECAY = 12, 0.9


@pytest.fixture(scope="module")
def spec() -> data.DataSpec:
    return data.prepare(data.resolve("shapes", ())[0])


def trained(folder: Path, spec: data.DataSpec, ema: float = DECAY, **axes: Any) -> TrainedCell:
    """A trial's training and scores, in this process."""
    cell = from_mapping({"model": "32/1/2", "batch_size": 16, "lr": 1e-3, **axes})
    task = CellTask(
        identity={}, config=cell.asdict(), control=cell.asdict(), data=spec.as_dict(), folder=str(folder),
        compile_cache=str(folder), seconds=0, times="nothing", train_steps=STEPS, fd_images=130, ema=ema,
    )  # fmt: skip
    run = TrainedCell(task, blank_record(task), Phases(folder))
    run.load_data()
    run.build()
    run.train()
    run.score()
    return run


def averaged_by_hand(run: TrainedCell) -> float:
    """The same average from the definition, over a training of the plain cell."""
    trainer, stream = trainer_of(from_mapping({"model": "32/1/2", "batch_size": 16, "lr": 1e-3})), run._stream()
    average = {name: tensor.double().clone() for name, tensor in trainer.model.state_dict().items()}
    for n in range(1, STEPS + 1):
        trainer.train_step(next(stream))
        d = min(DECAY, (1 + n) / (10 + n))
        average = {k: d * average[k] + (1 - d) * v.double() for k, v in trainer.model.state_dict().items()}
    plain = plain_model(trainer.model, average)  # type: ignore[arg-type]
    return velocity_mse(plain, data.load(run.spec, "test").images[:SCORED_IMAGES])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "default"])
def test_the_average_is_scored_beside_the_raw_weights(mode: str, tmp_path: Path, spec: data.DataSpec):
    run = trained(tmp_path, spec, compile=mode)
    row = run.record
    assert row["velocity_mse_ema"] == pytest.approx(averaged_by_hand(run), rel=1e-4)
    assert row["ema_decay"] == DECAY
    assert row["velocity_mse_ema"] > row["velocity_mse"] * 1.001, "the average lags behind the weights"
    assert row["probe_fd_ema"] != row["probe_fd"]
    assert (tmp_path / "samples_ema.png").read_bytes() != (tmp_path / "samples.png").read_bytes()


@pytest.mark.slow
def test_without_it_nothing_is_averaged_and_the_raw_scores_are_the_same(tmp_path: Path, spec: data.DataSpec):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with_, without = trained(tmp_path / "a", spec).record, trained(tmp_path / "b", spec, ema=0.0).record
    assert [without[name] for name in ("velocity_mse_ema", "probe_fd_ema", "ema_decay")] == [None] * 3
    assert without["velocity_mse"] == with_["velocity_mse"]
    assert without["probe_fd"] == with_["probe_fd"]
    assert not (tmp_path / "b" / "samples_ema.png").exists()


@pytest.mark.slow
def test_a_step_that_the_scaler_refused_is_not_averaged(tmp_path: Path, spec: data.DataSpec):
    run = trained(tmp_path, spec, precision="fp16")
    assert run.ema is not None
    assert run.ema.updates == run.record["steps_trained"] == STEPS


@pytest.mark.parametrize(("value", "part"), [("1", "fraction below 1"), ("x", "not a number")])
def test_a_decay_that_is_none_is_refused(value: str, part: str, tmp_path: Path) -> None:
    done = sweep_here("speed_grid.py", *TINY, *ONE_CPU, "--ema", value, cwd=tmp_path)
    assert done.returncode == 2
    assert part in done.stderr
