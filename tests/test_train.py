"""Training: the plain trainer, the fast one with its switches, their checkpoints and their failures."""

from __future__ import annotations

import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tinydit_ray.config import from_mapping
from tinydit_ray.flow import flow_matching_loss
from tinydit_ray.model import TinyDiT, TinyDiTConfig, build_model
from tinydit_ray.train import FastTrainer, Trainer, load_checkpoint, trainer_of
from tinydit_ray.train.trainer import MAX_SKIPPED_IN_A_ROW, Diverged

CONFIG = TinyDiTConfig(dim=32, depth=2)
SWITCHES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "medium": {"matmul_precision": "medium"},
    "bf16": {"amp_dtype": torch.bfloat16},
    "fp16": {"amp_dtype": torch.float16},
    "bf16 weights": {"weight_dtype": torch.bfloat16},
    "foreach": {"optimizer": "adamw-foreach"},
    "fused": {"optimizer": "adamw-fused"},
    "channels last": {"memory_format": "channels-last"},
}


pytestmark = pytest.mark.usefixtures("one_thread", "default_matmul_precision")


def model() -> TinyDiT:
    return build_model(CONFIG, seed=0)


def batches(n: int = 5, size: int = 4) -> list[tuple[Tensor, Tensor, Tensor]]:
    g = torch.Generator().manual_seed(7)
    shape = (size, 3, 32, 32)
    return [
        (torch.rand(shape, generator=g) * 2 - 1, torch.randn(shape, generator=g), torch.rand(size, generator=g))
        for _ in range(n)
    ]


def fast(**switches: Any) -> FastTrainer:
    return FastTrainer(model(), flow_matching_loss, **switches)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run(trainer: Trainer, data: list[Any]) -> list[float]:
    return [trainer.train_step(batch).item() for batch in data]


def gradient_norm(trainer: Trainer) -> float:
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in trainer.model.parameters()))


# --- one trainer, and the same with all switches off ------------------------------------------------------


def test_switched_off_the_fast_trainer_is_the_plain_one_to_the_last_bit():
    plain, switched_off = Trainer(model(), flow_matching_loss), fast()
    assert run(plain, batches()) == run(switched_off, batches())
    assert equal(weights(plain), weights(switched_off))
    states = plain.optimizer.state_dict()["state"], switched_off.optimizer.state_dict()["state"]
    for index, state in states[0].items():
        assert equal(state, states[1][index])
    assert not equal(weights(plain), model().state_dict())
    assert plain.steps == switched_off.steps == 5


def test_one_step_is_adamw_written_by_hand():
    """Loshchilov & Hutter (arXiv:1711.05101) with PyTorch's defaults, after clipping to norm 1."""
    trainer = Trainer(model().double(), lambda net, x: 50 * net(x, torch.rand(4).double()).square().mean(), lr=1e-2)
    before, x = weights(trainer), torch.randn(4, 3, 32, 32, dtype=torch.float64)
    trainer.model.t_embed = _DoubleTime(trainer.model.t_embed)
    torch.manual_seed(0)
    trainer.train_step(x)
    assert gradient_norm(trainer) == pytest.approx(1.0, rel=1e-5)
    for name, p in trainer.model.named_parameters():
        old = before[name.replace("t_embed.inner", "t_embed")]
        m, v = 0.1 * p.grad / (1 - 0.9), 0.001 * p.grad**2 / (1 - 0.999)
        expected = old * (1 - 1e-2 * 1e-2) - 1e-2 * m / (v.sqrt() + 1e-8)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-12)


class _DoubleTime(nn.Module):
    """Lets a float64 model take the fp32 time features."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, t: Tensor) -> Tensor:
        return self.inner(t)


def test_the_returned_loss_is_the_one_before_the_step_and_detached():
    trainer, batch = fast(), batches(1)[0]
    expected = flow_matching_loss(model(), batch).item()
    loss = trainer.train_step(batch)
    assert loss.item() == expected
    assert not loss.requires_grad
    assert loss.ndim == 0


def test_training_lowers_the_loss():
    trainer, batch = fast(lr=1e-2), batches(1)[0]
    losses = run(trainer, [batch] * 12)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_trains_close_to_fp32(name: str):
    plain, switched = Trainer(model(), flow_matching_loss), fast(**SWITCHES[name])
    exact = name in ("fp32", "foreach", "fused", "channels last")
    assert run(switched, batches()) == pytest.approx(run(plain, batches()), rel=1e-4 if exact else 2e-2)
    assert (switched.steps, switched.skipped_steps) == (5, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_and_gradients_stay_fp32_under_autocast(dtype: torch.dtype):
    trainer = fast(amp_dtype=dtype)
    seen: set[torch.dtype] = set()
    trainer.model.blocks[0].attn.qkv.register_forward_hook(lambda _m, _i, out: seen.add(out.dtype))
    loss = trainer.train_step(batches(1)[0])
    assert seen == {dtype}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert loss.dtype == torch.float32


def test_bf16_weights_are_bf16_and_so_are_their_activations():
    trainer = fast(weight_dtype=torch.bfloat16)
    seen: set[torch.dtype] = set()
    trainer.model.final.register_forward_hook(lambda _m, _i, out: seen.add(out.dtype))
    trainer.train_step(batches(1)[0])
    assert seen == {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}


def test_fp32_enters_no_autocast_context(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_a: Any, **_k: Any) -> None:
        raise AssertionError("an autocast context was made")

    trainer = fast()
    monkeypatch.setattr(torch, "autocast", refuse)
    assert isinstance(trainer.autocast(), nullcontext)
    trainer.train_step(batches(1)[0])
    with pytest.raises(AssertionError, match="autocast"):
        fast(amp_dtype=torch.bfloat16).train_step(batches(1)[0])


def test_channels_last_reaches_weights_and_images():
    trainer = fast(memory_format="channels-last")
    seen: list[bool] = []
    trainer.model.embed.register_forward_pre_hook(
        lambda _m, inputs: seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    trainer.train_step(batches(1)[0])
    assert seen == [True]
    assert trainer.model.embed.proj.weight.is_contiguous(memory_format=torch.channels_last)


def test_two_matmul_precisions_in_one_process_do_not_disturb_each_other():
    alone, data = fast(), batches()
    run(alone, data)
    seen: list[str] = []

    def loss_fn(net: Any, batch: Any) -> Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return flow_matching_loss(net, batch)

    medium = FastTrainer(model(), loss_fn, matmul_precision="medium")
    highest = FastTrainer(model(), loss_fn)
    for batch in data:
        medium.train_step(batch)
        highest.train_step(batch)
    assert seen == ["medium", "highest"] * 5
    assert equal(weights(highest), weights(alone))


def test_matmul_precision_still_holds_after_an_evaluation_in_full_precision():
    from tinydit_ray.quality import velocity_mse

    seen: list[str] = []

    def loss_fn(net: Any, batch: Any) -> Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return flow_matching_loss(net, batch)

    undisturbed, trainer = fast(matmul_precision="medium"), FastTrainer(model(), loss_fn, matmul_precision="medium")
    data = batches(2)
    run(undisturbed, data)
    trainer.train_step(data[0])
    velocity_mse(trainer.model, data[0][0])
    trainer.train_step(data[1])
    assert seen == ["medium", "medium"]
    assert equal(weights(trainer), weights(undisturbed))


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16 weights", "fused", "medium"])
def test_no_step_waits_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch):
    """No value of a tensor is asked for within a step; on CUDA each such question is a synchronisation.

    The optimiser's own step counters live on the CPU and are not counted.
    """
    trainer, batch = fast(**SWITCHES[name]), batches(1)[0]
    asked: list[str] = []

    def spy(method: str) -> None:
        original = getattr(torch.Tensor, method)

        def spied(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if not caller.startswith("torch.optim"):
                asked.append(f"{method} in {caller}")
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, method, spied)

    for method in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        spy(method)
    trainer.train_step(batch)
    assert asked == []
    trainer.train_step(batch).item()
    assert asked == [f"item in {__name__}"]


# --- gradient clipping and the loss scaler ----------------------------------------------------------------


def steep(net: Any, batch: Any) -> Tensor:
    return 4 * flow_matching_loss(net, batch)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_the_clip_is_on_true_gradients(name: str):
    """Scaled by 65,536, every gradient would look clipped at 1,000; unscaled, none is."""
    free = FastTrainer(model(), steep, max_grad_norm=None, **SWITCHES[name])
    clipped = FastTrainer(model(), steep, max_grad_norm=0.25, **SWITCHES[name])
    loose = FastTrainer(model(), steep, max_grad_norm=1000.0, **SWITCHES[name])
    for trainer in (free, clipped, loose):
        trainer.train_step(batches(1)[0])
    assert 2 < gradient_norm(free) < 900
    assert gradient_norm(clipped) == pytest.approx(0.25, rel=1e-3)
    assert gradient_norm(loose) == pytest.approx(gradient_norm(free), rel=1e-6)


@pytest.mark.parametrize("off", [None, 0, 0.0])
@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_no_clip(off: float | None, name: str):
    trainer = FastTrainer(model(), steep, max_grad_norm=off, **SWITCHES[name])
    trainer.train_step(batches(1)[0])
    _, grads = FastTrainer(model(), steep).gradients(batches(1)[0])
    expected = math.sqrt(sum(g.square().sum().item() for g in grads.values()))
    assert expected > 2
    assert gradient_norm(trainer) == pytest.approx(expected, rel=1e-2)


def test_one_is_the_default_clip():
    trainer = Trainer(model(), steep)
    trainer.train_step(batches(1)[0])
    assert gradient_norm(trainer) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_gradients_are_unscaled_unclipped_and_leave_everything_alone(name: str):
    trainer = FastTrainer(model(), steep, **SWITCHES[name])
    plain = model()
    steep(plain, batches(1)[0]).backward()
    loss, grads = trainer.gradients(batches(1)[0])
    assert loss == pytest.approx(steep(plain, batches(1)[0]).item(), rel=1e-2)
    assert list(grads) == [n for n, _ in plain.named_parameters()]
    for n, p in plain.named_parameters():
        assert (grads[n] - p.grad).norm() <= 0.05 * p.grad.norm() + 1e-3, n
        assert grads[n].dtype == torch.float32
    assert equal(weights(trainer), model().state_dict())
    assert trainer.steps == 0
    assert all(p.grad is None for p in trainer.model.parameters())


class Failing:
    """A loss that is multiplied by ``factor`` at the given calls."""

    def __init__(self, factor: float, calls: range | set[int]) -> None:
        self.factor, self.calls, self.count = factor, calls, 0

    def __call__(self, net: Any, batch: Any) -> Tensor:
        self.count += 1
        loss = flow_matching_loss(net, batch)
        return loss * self.factor if self.count in self.calls else loss


def test_a_skipped_fp16_step_is_counted_and_changes_nothing():
    trainer = FastTrainer(model(), Failing(math.inf, {2}), amp_dtype=torch.float16)
    data = batches(3)
    trainer.train_step(data[0])
    before, scale = weights(trainer), trainer.scaler.get_scale()
    trainer.train_step(data[1])
    assert (trainer.steps, trainer.skipped_steps) == (1, 1)
    assert equal(weights(trainer), before)
    assert trainer.scaler.get_scale() == scale / 2
    trainer.train_step(data[2])
    assert (trainer.steps, trainer.skipped_steps) == (2, 1)
    assert not equal(weights(trainer), before)


def test_a_scaled_overflow_is_skipped_where_the_loss_is_finite():
    """What the scaler is for: 2^16 times a steep loss leaves fp16, a lower scale does not."""
    trainer = FastTrainer(model(), Failing(3e4, range(1, 1000)), amp_dtype=torch.float16)
    history = trainer.fit(batches(), max_steps=3, log_every=1)
    assert trainer.skipped_steps > 0
    assert [step for step, _ in history] == [1, 2, 3]
    assert all(math.isfinite(loss) for _, loss in history)


def test_growing_the_scale_is_not_a_skipped_step():
    trainer = fast(amp_dtype=torch.float16)
    trainer.scaler.set_growth_interval(2)
    run(trainer, batches(5))
    assert (trainer.steps, trainer.skipped_steps) == (5, 0)
    assert trainer.scaler.get_scale() == 4 * 65536


def test_training_ends_when_every_step_is_refused():
    trainer = FastTrainer(model(), Failing(math.inf, range(3, 10_000)), amp_dtype=torch.float16)
    with pytest.raises(Diverged, match="refused 30 steps in a row"):
        trainer.fit(batches(), max_steps=10)
    assert (trainer.steps, trainer.skipped_steps) == (2, MAX_SKIPPED_IN_A_ROW)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_training_ends_when_the_loss_is_not_finite(name: str):
    trainer = FastTrainer(model(), Failing(math.nan, {3}), **SWITCHES[name])
    logged: list[int] = []
    with pytest.raises(Diverged, match="nan after 4 steps"):
        trainer.fit(batches(), max_steps=100, log_every=2, on_log=lambda step, _loss: logged.append(step))
    assert logged == [2]


def test_plain_training_ends_when_the_loss_is_not_finite():
    with pytest.raises(Diverged, match="after 5 steps"):
        Trainer(model(), Failing(math.inf, {5})).fit(batches(), max_steps=5)


# --- fit and evaluate -------------------------------------------------------------------------------------


def test_fit_logs_means_and_goes_round_the_loader():
    data, logged = batches(3), []
    history = fast().fit(data, max_steps=7, log_every=3, on_log=lambda *entry: logged.append(entry))
    twin = fast()
    losses = run(twin, [*data, *data, data[0]])
    expected = [(3, sum(losses[:3]) / 3), (6, sum(losses[3:6]) / 3), (7, losses[6])]
    assert [step for step, _ in history] == [3, 6, 7]
    assert [loss for _, loss in history] == pytest.approx([loss for _, loss in expected], rel=1e-6)
    assert logged == history


def test_fit_counts_steps_already_taken():
    trainer = fast()
    trainer.fit(batches(), max_steps=2)
    assert trainer.fit(batches(), max_steps=2) == []
    assert [step for step, _ in trainer.fit(batches(), max_steps=4)] == [4]
    assert trainer.steps == 4


def test_a_loader_without_batches_is_said():
    with pytest.raises(ValueError, match="no batch"):
        fast().fit([], max_steps=1)


def test_evaluating_without_batches_is_said():
    with pytest.raises(ValueError, match="no batch"):
        fast().evaluate([])


def test_evaluate_is_the_mean_loss_and_changes_nothing():
    trainer, data, modes = fast(), batches(3), []
    trainer.model.register_forward_pre_hook(lambda module, _i: modes.append(module.training))
    expected = sum(flow_matching_loss(model(), batch).item() for batch in data) / 3
    assert trainer.evaluate(data) == pytest.approx(expected, rel=1e-6)
    assert modes == [False] * 3
    assert trainer.model.training
    assert equal(weights(trainer), model().state_dict())
    assert all(p.grad is None for p in trainer.model.parameters())


# --- checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_holds_plain_names_and_types(tmp_path: Path):
    trainer = fast(compile=True)
    trainer.save(tmp_path / "x.pt", config=CONFIG)
    state = torch.load(tmp_path / "x.pt", weights_only=True)
    assert {"model", "config"} <= state.keys()
    assert state["config"] == vars(CONFIG)
    assert list(state["model"]) == list(model().state_dict())
    TinyDiT(TinyDiTConfig(**state["config"])).load_state_dict(state["model"], strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["model", "block"])
def test_compiling_never_shows_in_the_names(scope: str, tmp_path: Path):
    trainer = fast(compile="default", compile_scope=scope)
    trainer.save(tmp_path / "x.pt")
    assert not [name for name in load_checkpoint(tmp_path / "x.pt")["model"] if "_orig_mod" in name]
    assert trainer.model is trainer.model
    assert isinstance(trainer.model, TinyDiT)


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "bf16 weights", "fused"])
def test_a_resumed_training_ends_where_an_uninterrupted_one_does(name: str, tmp_path: Path):
    data = batches(6)
    whole = fast(**SWITCHES[name])
    losses = run(whole, data)
    first, second = fast(**SWITCHES[name]), fast(**SWITCHES[name])
    assert run(first, data[:3]) == losses[:3]
    first.save(tmp_path / "x.pt", config=CONFIG)
    second.load(tmp_path / "x.pt")
    assert second.steps == 3
    assert run(second, data[3:]) == losses[3:]
    assert equal(weights(second), weights(whole))
    assert second.steps == 6


def test_the_loss_scale_and_the_skipped_steps_come_back(tmp_path: Path):
    first = FastTrainer(model(), Failing(math.inf, {1, 2}), amp_dtype=torch.float16)
    run(first, batches(3))
    first.save(tmp_path / "x.pt")
    second = fast(amp_dtype=torch.float16)
    second.load(tmp_path / "x.pt")
    assert (second.steps, second.skipped_steps) == (1, 2)
    assert second.scaler.get_scale() == 65536 / 4


def test_a_checkpoint_carries_more_where_asked(tmp_path: Path):
    fast().save(tmp_path / "x.pt", config={"dim": 32}, stream={"step": 3})
    state = fast().load(tmp_path / "x.pt")
    assert state["stream"] == {"step": 3}
    assert state["config"] == {"dim": 32}


def test_loading_is_strict(tmp_path: Path):
    names = model().state_dict()
    torch.save({"model": {**names, "extra": torch.zeros(1)}, "config": None}, tmp_path / "more.pt")
    torch.save({"model": dict(list(names.items())[1:]), "config": None}, tmp_path / "less.pt")
    for file in ("more.pt", "less.pt"):
        with pytest.raises(RuntimeError, match="state_dict"):
            fast().load(tmp_path / file)


class _Command:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path):
    torch.save({"model": {}, "config": _Command(tmp_path / "ran")}, tmp_path / "x.pt")
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        load_checkpoint(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


def test_a_kill_while_saving_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = fast()
    trainer.save(tmp_path / "x.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
    run(trainer, batches(1))

    def half(_state: Any, path: Path) -> None:
        Path(path).write_bytes(b"half of a checkpoint")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        with pytest.raises(KeyboardInterrupt):
            trainer.save(tmp_path / "x.pt")
    state = load_checkpoint(tmp_path / "x.pt")
    assert state["steps"] == 0
    assert equal(state["model"], model().state_dict())
    trainer.save(tmp_path / "x.pt")
    assert load_checkpoint(tmp_path / "x.pt")["steps"] == 1


@pytest.mark.slow
def test_a_compiled_training_and_a_plain_one_exchange_checkpoints(tmp_path: Path):
    small = TinyDiTConfig(dim=32, depth=1)
    torch._dynamo.reset()
    data = batches(4, size=8)
    plain, compiled = (FastTrainer(build_model(small, 0), compile=how) for how in (False, True))
    losses = run(plain, data)
    run(compiled, data[:2])
    compiled.save(tmp_path / "compiled.pt", config=small)
    goes_on = FastTrainer(build_model(small, 1))
    goes_on.load(tmp_path / "compiled.pt")
    assert run(goes_on, data[2:]) == pytest.approx(losses[2:], rel=1e-4)
    goes_on.save(tmp_path / "plain.pt", config=small)
    compiled.load(tmp_path / "plain.pt")
    again = compiled.train_step(data[0]).item()
    assert again == pytest.approx(goes_on.train_step(data[0]).item(), rel=1e-4)
    # in place, so the compiled graph itself sees the weights
    compiled.restart({name: tensor.clone() for name, tensor in build_model(small, 0).state_dict().items()})
    assert run(compiled, data) == pytest.approx(losses, rel=1e-4)


# --- restart, and a cell's trainer ------------------------------------------------------------------------


@pytest.mark.parametrize("name", SWITCHES)
def test_a_restarted_trainer_goes_the_way_of_a_fresh_one(name: str):
    trainer, fresh = fast(**SWITCHES[name]), fast(**SWITCHES[name])
    start = weights(trainer)
    run(trainer, batches(3)[::-1])
    trainer.skipped_steps = 2
    if trainer.scaler is not None:
        trainer.scaler.update(1024.0)
    trainer.restart(start)
    assert (trainer.steps, trainer.skipped_steps) == (0, 0)
    assert run(trainer, batches()) == run(fresh, batches())
    assert equal(weights(trainer), weights(fresh))
    if trainer.scaler is not None:
        assert trainer.scaler.get_scale() == fresh.scaler.get_scale()


def test_a_cells_trainer_applies_every_axis():
    cell = from_mapping(
        {"dim": 32, "depth": 1, "attention": "sdpa", "precision": "fp16", "qkv": "separate", "gelu": "tanh",
         "adaln": "merged", "patches": "linear", "memory_format": "channels-last", "optimizer": "adamw-fused",
         "lr": 1e-2, "max_grad_norm": "off", "seed": 3}
    )  # fmt: skip
    trainer = trainer_of(cell)
    assert trainer.lr == trainer.optimizer.param_groups[0]["lr"] == 1e-2
    assert trainer.max_grad_norm is None
    assert trainer.amp_dtype == torch.float16
    assert trainer.scaler is not None
    assert trainer.layout == torch.channels_last
    assert trainer.optimizer.param_groups[0]["fused"] is True
    cfg = trainer.model.cfg
    assert (cfg.dim, cfg.depth, cfg.attention, cfg.qkv) == (32, 1, "sdpa", "separate")
    assert (cfg.gelu, cfg.adaln, cfg.patches) == ("tanh", "merged", "linear")
    assert equal(weights(trainer), build_model(TinyDiTConfig(dim=32, depth=1), seed=3).state_dict())


@pytest.mark.parametrize(
    ("precision", "amp", "weight", "matmul"),
    [("fp32", None, torch.float32, "highest"), ("fp32-medium", None, torch.float32, "medium"),
     ("bf16", torch.bfloat16, torch.float32, "highest"), ("bf16-weights", None, torch.bfloat16, "highest")],
)  # fmt: skip
def test_a_cells_precision(precision: str, amp: Any, weight: torch.dtype, matmul: str):
    trainer = trainer_of(from_mapping({"dim": 32, "depth": 1, "precision": precision}))
    assert trainer.amp_dtype == amp
    assert next(trainer.model.parameters()).dtype == weight
    assert trainer.matmul_precision == matmul
    assert trainer.scaler is None


@pytest.mark.slow
def test_compiled_or_not():
    eager = trainer_of(from_mapping({"dim": 32, "depth": 1}))
    assert eager.net is eager.model
    compiled = trainer_of(from_mapping({"dim": 32, "depth": 1, "compile": "default"}))
    assert compiled.net is not compiled.model
    assert compiled.net._orig_mod is compiled.model
