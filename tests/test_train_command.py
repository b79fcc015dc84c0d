"""``python -m tinydit_ray.train``: what it leaves behind, what it refuses, and going on after every kind of end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tinydit_ray.model import TinyDiT, TinyDiTConfig
from tinydit_ray.quality import velocity_mse
from tinydit_ray.train import load_checkpoint
from tinydit_ray.train.__main__ import main
from tinydit_ray.train.ema import Ema
from tinydit_ray.train.files import RunFolder

MICRO = [
    "--data", "shapes", "--set", "dim=32", "--set", "depth=1", "--set", "heads=2", "--batch-size", "16",
    "--device", "cpu", "--threads", "1", "--sample-steps", "2", "--samples", "16",
]  # fmt: skip
FEW = ["--fd-n", "0", "--steps", "24", "--save-every", "8", "--eval-every", "12"]
BRIEF = ["--fd-n", "0", "--steps", "16", "--eval-every", "16"]
LONG = ["--fd-n", "0", "--steps", "400", "--save-every", "20", "--eval-every", "400"]


SCORED = 200  # test images behind the velocity MSE in this process; the command itself takes 2,000


@pytest.fixture(scope="module", autouse=True)
def small_and_tidy():
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinydit_ray.train.run.SCORED_IMAGES", SCORED)
        yield
    torch.set_num_threads(before)


def train(out: Path, *arguments: str) -> int:
    return main(["--out", str(out), *MICRO, *arguments])


def metrics(out: Path) -> dict[str, Any]:
    return json.loads((out / "metrics.json").read_text())


def weights(out: Path, name: str = "checkpoint.pt") -> dict[str, torch.Tensor]:
    return load_checkpoint(out / name)["model"]


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short complete run."""
    out = tmp_path_factory.mktemp("train") / "few"
    assert train(out, *FEW) == 0
    return out


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run long enough to be interrupted, here left alone."""
    out = tmp_path_factory.mktemp("train") / "long"
    assert train(out, *LONG) == 0
    return out


def test_a_run_leaves_metrics_pictures_and_a_plain_checkpoint(tmp_path: Path):
    assert train(tmp_path, *FEW, "--fd-n", "80", "--sampler", "heun") == 0
    found = metrics(tmp_path)
    assert found["status"] == "complete"
    assert (found["config"]["dim"], found["config"]["batch_size"], found["data_source"]) == (32, 16, "shapes")
    assert [row[0] for row in found["loss_curve"]] == [10, 20, 24]
    assert all(0 < row[1] < 10 for row in found["loss_curve"])
    assert [row[0] for row in found["velocity_mse_curve"]] == [0, 12, 24]
    assert found["velocity_mse"] == found["velocity_mse_curve"][-1][1] < found["velocity_mse_curve"][0][1]
    assert found["velocity_mse_ema"] is None
    assert (found["probe_fd_n"], found["scoring"]["sampler"], found["scoring"]["sample_steps"]) == (80, "heun", 2)
    assert found["probe_fd"] > 0
    assert found["probe_id"].startswith("shapes-")
    for name in ("ms_per_step", "images_per_s", "first_step_s", "train_wall_s", "batch_ms"):
        assert found[name] > 0, name
    assert (found["steps_trained"], found["skipped_optimizer_steps"], found["sessions"]) == (24, 0, 1)
    assert Image.open(tmp_path / "samples.png").size == (8 * 34 + 2, 2 * 34 + 2)
    assert Image.open(tmp_path / "strip.png").size == (8 * 34 + 2, 3 * 34 + 2)
    state = load_checkpoint(tmp_path / "checkpoint.pt")
    model = TinyDiT(TinyDiTConfig(**state["config"]))
    model.load_state_dict(state["model"], strict=True)


def test_the_reported_score_is_the_checkpoints(few: Path):
    from tinydit_ray.data import load, resolve

    state = load_checkpoint(few / "checkpoint.pt")
    model = TinyDiT(TinyDiTConfig(**state["config"]))
    model.load_state_dict(state["model"])
    test = load(resolve("shapes")[0], "test").images[:SCORED]
    assert metrics(few)["velocity_mse"] == pytest.approx(velocity_mse(model, test), rel=1e-6)


def test_the_same_command_after_completion_changes_nothing(few: Path, capsys: pytest.CaptureFixture[str]):
    before = {path.name: path.stat().st_mtime_ns for path in few.iterdir() if path.suffix}
    assert train(few, *FEW) == 0
    assert "complete" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in few.iterdir() if path.suffix} == before


def test_more_steps_go_on_to_the_weights_of_a_run_of_that_length(few: Path, tmp_path: Path):
    assert train(tmp_path / "a", *FEW, "--steps", "12") == 0
    first_s = metrics(tmp_path / "a")["train_wall_s"]
    assert train(tmp_path / "a", *FEW) == 0
    assert equal(weights(tmp_path / "a"), weights(few))
    found = metrics(tmp_path / "a")
    assert (found["steps_trained"], found["sessions"]) == (24, 2)
    assert found["train_wall_s"] > first_s
    assert found["velocity_mse_curve"] == metrics(few)["velocity_mse_curve"]


def test_other_scoring_scores_anew_without_training(few: Path, tmp_path: Path):
    assert train(tmp_path / "a", *FEW) == 0
    saved = (tmp_path / "a/checkpoint.pt").stat().st_mtime_ns
    assert train(tmp_path / "a", *FEW, "--samples", "8") == 0
    assert Image.open(tmp_path / "a/samples.png").size == (8 * 34 + 2, 34 + 2)
    assert (tmp_path / "a/checkpoint.pt").stat().st_mtime_ns == saved


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tinydit_ray.train", "--out", str(out), *MICRO, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.002)


@pytest.mark.slow
def test_ctrl_c_keeps_a_checkpoint_and_the_same_command_ends_in_the_same_weights(long: Path, tmp_path: Path):
    out = tmp_path / "a"
    process = start(out, *LONG)
    wait_for(out / "checkpoint.prev.pt", process)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130, printed + errors
    assert "finishing this step" in errors
    assert "go on with the same command: python -m tinydit_ray.train" in errors
    assert "Traceback" not in errors
    stopped = load_checkpoint(out / "checkpoint.pt")["steps"]
    assert 40 <= stopped < 400
    assert train(out, *LONG) == 0
    assert equal(weights(out), weights(long))
    assert [row[:2] for row in metrics(out)["loss_curve"]] == [row[:2] for row in metrics(long)["loss_curve"]]
    assert (out / "strip.png").read_bytes() == (long / "strip.png").read_bytes()
    assert (out / "samples.png").read_bytes() == (long / "samples.png").read_bytes()


@pytest.mark.slow
def test_a_kill_loses_at_most_the_steps_since_the_last_checkpoint(long: Path, tmp_path: Path):
    out = tmp_path / "a"
    process = start(out, *LONG)
    wait_for(out / "checkpoint.prev.pt", process)
    time.sleep(0.1)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    newest = RunFolder(out).newest()[1]
    assert newest["steps"] % 20 == 0
    assert newest["steps"] >= 20
    assert train(out, *LONG) == 0
    assert equal(weights(out), weights(long))
    assert not list(out.glob("*.tmp"))


def test_ctrl_c_during_an_evaluation_leaves_at_once_and_makes_it_up_later(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: Any) -> float:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on after the signal")

    assert train(tmp_path, *FEW, "--steps", "8", "--eval-every", "24") == 0
    with monkeypatch.context() as patch:
        patch.setattr("tinydit_ray.train.run.velocity_mse", interrupted)
        assert train(tmp_path, *FEW) == 130
    assert load_checkpoint(tmp_path / "checkpoint.pt")["steps"] == 12
    assert train(tmp_path, *FEW) == 0
    assert equal(weights(tmp_path), weights(few))
    assert metrics(tmp_path)["velocity_mse_curve"][-2:] == metrics(few)["velocity_mse_curve"][-2:]


def test_a_full_disk_keeps_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    assert train(tmp_path, *BRIEF, "--steps", "4") == 0
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        assert_refused(train(tmp_path, *BRIEF), capsys, "checkpoint.pt: not written (No space left on device)")
    assert load_checkpoint(tmp_path / "checkpoint.pt")["steps"] == 4
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("damage", ["cut", "one byte", "missing", "empty"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    damage: str, few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert train(tmp_path, *FEW, "--steps", "20", "--eval-every", "24") == 0
    path = tmp_path / "checkpoint.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "one byte": bytes(content)}[damage])
    assert train(tmp_path, *FEW) == 0
    printed = capsys.readouterr().out
    assert f"checkpoint.pt is {'missing' if damage == 'missing' else 'damaged'}" in printed
    assert "falling back to checkpoint.prev.pt" in printed
    assert equal(weights(tmp_path), weights(few))


def test_two_damaged_checkpoints_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("checkpoint.pt", "checkpoint.prev.pt"):
        (tmp_path / name).write_bytes(b"nothing")
    assert_refused(train(tmp_path, *FEW), capsys, "checkpoint.prev.pt is damaged")


OTHER = {
    "rate": (["--lr", "1e-3"], "lr 0.0003 there, 0.001 asked"),
    "precision": (["--amp", "bf16"], "precision 'fp32' there, 'bf16' asked"),
    "classes": (["--classes", "1,9"], "classes [] there, [1, 9] asked"),
    "average": (["--ema", "0.9"], "ema 'off' there, 0.9 asked"),
    "fewer steps": (["--steps", "10"], "is at step 24 already"),
}


@pytest.mark.parametrize("change", OTHER)
def test_a_checkpoint_of_another_run_is_refused(change: str, few: Path, capsys: pytest.CaptureFixture[str]):
    arguments, part = OTHER[change]
    before = weights(few)
    assert_refused(train(few, *FEW, *arguments), capsys, part)
    assert equal(weights(few), before)


MISTAKES = {
    "unknown axis": (["--set", "dimm=64"], "did you mean 'dim'"),
    "unknown value": (["--attention", "spda"], "did you mean 'sdpa'"),
    "twice": (["--set", "heads=5"], "given twice"),
    "two values": (["--set", "optimizer=adamw,adamw-fused"], "a run takes one value"),
    "axis by option and by set": (["--lr", "1e-3", "--set", "lr=1"], "lr is given twice"),
    "not a number": (["--lr", "fast"], "lr: 'fast' is not a number"),
    "unknown device": (["--device", "tpu"], "device: 'tpu' is not possible"),
    "threads": (["--threads", "4096"], "this machine has"),
    "decay": (["--ema", "1"], "not a decay"),
    "no steps": (["--steps", "0"], "at least 1"),
    "amp": (["--amp", "fp8"], "invalid choice"),
    "workers": (["--set", "workers=2"], "trains in one process"),
    "unsupported": (["--set", "cuda_graph=on"], "cuda_graph on"),
    "option": (["--stepz", "5"], "unrecognized arguments: --stepz"),
    "no profile": (["--profile", "nowhere.yaml"], "cannot be read"),
    "no such data": (["--data", "nowhere"], "'nowhere' is neither"),
    "no such class": (["--classes", "11"], "11 is not in shapes"),
    "batch": (["--batch-size", "20000"], "more than the 10000 training images"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_line(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments, part = MISTAKES[mistake]
    assert_refused(train(tmp_path, *FEW, *arguments), capsys, part)
    assert not (tmp_path / "checkpoint.pt").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert_refused(train(tmp_path, "--device", "cuda"), capsys, "no usable CUDA device")


def test_an_unwritable_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert_refused(train(tmp_path / "file" / "run", *FEW), capsys, "cannot be written")


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with RunFolder(tmp_path):
        assert_refused(train(tmp_path, *FEW), capsys, "another process is training there")


def assert_refused(status: int, capsys: pytest.CaptureFixture[str], part: str) -> None:
    errors = capsys.readouterr().err
    assert status == 2, errors
    assert part in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_profile_lies_under_set(tmp_path: Path):
    profile = tmp_path / "best.yaml"
    profile.write_text("model: tiny\ncompile: off\nattention: sdpa\noptimizer: adamw-foreach\nlr: 1e-4\n")
    assert train(tmp_path / "a", *FEW, "--steps", "1", "--profile", str(profile), "--attention", "manual") == 0
    found = metrics(tmp_path / "a")["config"]
    assert (found["attention"], found["optimizer"], found["lr"]) == ("manual", "adamw-foreach", 1e-4)
    assert (found["dim"], found["depth"], found["heads"]) == (32, 1, 2)


@pytest.mark.parametrize("text", ["- attention\n", "attention: [sdpa, manual]\n", "a: [\n", "attentoin: sdpa\n"])
def test_a_bad_profile_names_its_file(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bad.yaml").write_text(text)
    assert_refused(train(tmp_path, "--profile", str(tmp_path / "bad.yaml")), capsys, "bad.yaml")


def test_divergence_ends_with_3_and_keeps_the_last_good_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [*FEW, "--lr", "1e30", "--set", "max_grad_norm=off", "--save-every", "1"]
    assert train(tmp_path, *arguments) == 3
    errors = capsys.readouterr().err
    assert errors.startswith("diverged: ")
    assert len(errors.strip().splitlines()) == 1
    assert metrics(tmp_path)["status"] == "diverged"
    for path in tmp_path.glob("checkpoint*.pt"):
        assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path, path.name).values())


@pytest.mark.slow
def test_averaged_weights_have_scores_of_their_own(tmp_path: Path, few: Path):
    assert train(tmp_path, *FEW, "--fd-n", "80", "--ema", "0.9") == 0
    found = metrics(tmp_path)
    assert equal(weights(tmp_path), weights(few))
    assert found["velocity_mse_ema"] != found["velocity_mse"]
    assert found["probe_fd_ema"] != found["probe_fd"]
    assert len(found["velocity_mse_ema_curve"]) == 3
    assert (tmp_path / "samples_ema.png").read_bytes() != (tmp_path / "samples.png").read_bytes()


def test_decay_0_is_the_raw_weights(tmp_path: Path):
    assert train(tmp_path, *FEW, "--fd-n", "80", "--ema", "0") == 0
    found = metrics(tmp_path)
    assert (found["velocity_mse_ema"], found["probe_fd_ema"]) == (found["velocity_mse"], found["probe_fd"])
    state = load_checkpoint(tmp_path / "checkpoint.pt")
    assert equal(state["ema"]["weights"], state["model"])


def test_the_average_is_the_formulas():
    model = torch.nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(1.0)
    ema, wanted = Ema(model, 0.5), 1.0
    for n in range(1, 12):
        model.weight.data.fill_(float(n))
        ema.update()
        d = min(0.5, (1 + n) / (10 + n))
        wanted = d * wanted + (1 - d) * n
    assert ema.weights["weight"].dtype == torch.float32
    assert ema.weights["weight"].item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-weights", "fp16"])
def test_averaged_weights_follow_a_resumed_run_in_every_precision(precision: str, tmp_path: Path):
    arguments = [*BRIEF, "--set", f"precision={precision}", "--ema", "0.9"]
    assert train(tmp_path / "a", *arguments, "--steps", "10") == 0
    assert train(tmp_path / "a", *arguments) == 0
    assert train(tmp_path / "b", *arguments) == 0
    a, b = (load_checkpoint(tmp_path / name / "checkpoint.pt") for name in "ab")
    assert equal(a["model"], b["model"])
    assert equal(a["ema"]["weights"], b["ema"]["weights"])
    assert all(tensor.dtype == torch.float32 for tensor in a["ema"]["weights"].values())


@pytest.mark.slow
def test_a_compiled_run_is_averaged_and_resumed_under_plain_names(tmp_path: Path, few: Path):
    arguments = [*FEW, "--compile", "--ema", "0.9"]
    assert train(tmp_path, *arguments, "--steps", "12") == 0
    assert train(tmp_path, *arguments) == 0
    state, plain = load_checkpoint(tmp_path / "checkpoint.pt"), weights(few)
    assert state["model"].keys() == state["ema"]["weights"].keys() == plain.keys()
    for name, tensor in state["model"].items():
        assert torch.allclose(tensor, plain[name], atol=1e-3), name
    assert not equal(state["ema"]["weights"], state["model"])


@pytest.mark.slow
def test_it_runs_as_a_command_and_prints_plain_lines_without_a_terminal(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "tinydit_ray.train", "--out", "run", *MICRO, *FEW],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in ("device: cpu, as asked", "data: shapes", "parameters", "step 24/24  loss", "ms/step", "complete:"):
        assert part in done.stdout, part
    assert "\x1b" not in done.stdout
    assert metrics(tmp_path / "run")["velocity_mse_n"] == 2000
