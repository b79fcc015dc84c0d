"""A trial that was started again trains on exactly as one that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tinydit_ray import data
from tinydit_ray.cell import CellTask, Phases, blank_record
from tinydit_ray.config import from_mapping
from tinydit_ray.measure_training import TrainedCell

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(folder: Path, steps: int, **axes: str) -> TrainedCell:
    """A trial's training in this process, with a checkpoint at each entry of the loss curve."""
    cell = from_mapping({"model": "32/1/2", "batch_size": 16, **axes})
    folder.mkdir(exist_ok=True)
    task = CellTask(
        identity={}, config=cell.asdict(), control=cell.asdict(), folder=str(folder), compile_cache=str(folder),
        data=data.prepare(data.resolve("shapes", ())[0]).as_dict(), seconds=0, times="nothing", train_steps=steps,
        ema=0.9, max_failures=1,
    )  # fmt: skip
    run = TrainedCell(task, blank_record(task), Phases(folder))
    assert run.checkpoint
    run.checkpoint.every_s = 0.0
    run.load_data()
    run.build()
    run.train()
    return run


def loss_curve(folder: Path) -> list[tuple[str, str]]:
    rows = [line.split(",") for line in (folder / "loss.csv").read_text().splitlines()[1:]]
    seconds = [float(row[2]) for row in rows]
    assert seconds == sorted(seconds)
    return [(step, loss) for step, loss, _ in rows]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])  # fp16 has a loss scaler
def test_a_second_start_goes_on_where_the_checkpoint_is(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained(tmp_path / "whole", 40, precision=precision)
    trained(tmp_path / "halves", 20, precision=precision)
    assert "training goes on" not in capsys.readouterr().out
    second = trained(tmp_path / "halves", 40, precision=precision)
    assert "training goes on at step 20" in capsys.readouterr().out
    assert loss_curve(tmp_path / "halves") == loss_curve(tmp_path / "whole")
    assert whole.ema is not None
    assert second.ema is not None
    for name, tensor in whole.trainer.model.state_dict().items():
        assert torch.equal(tensor, second.trainer.model.state_dict()[name]), name
        assert torch.equal(whole.ema.weights[name], second.ema.weights[name]), name
    assert second.record["steps_trained"] == 40
    assert second.checkpoint
    second.checkpoint.remove()
    assert not (tmp_path / "halves" / "checkpoint").exists()
