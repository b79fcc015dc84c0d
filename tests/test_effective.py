"""What really ran, what cannot run here, and what does not compute the same: seen, never echoed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinydit_ray.bench import memory
from tinydit_ray.bench.agreement import TOLERANCES, Agreement, compare, reference_of, worst_gradient
from tinydit_ray.bench.capability import (
    Unsupported,
    check_capability,
    cxx_problem,
    medium_matmul_rounds,
)
from tinydit_ray.bench.effective import (
    CompileCounts,
    compile_counts,
    mismatches,
    no_recompiles,
    process_facts,
    trace_facts,
    trace_step,
)
from tinydit_ray.bench.flops import closed_form_gflops, model_gflops_per_step
from tinydit_ray.config import CellConfig, from_mapping
from tinydit_ray.flow import flow_matching_loss
from tinydit_ray.model.attention import attention, kernel_of
from tinydit_ray.train import FastTrainer, trainer_of

SIZE = {"dim": 32, "depth": 1, "batch_size": 4}
THREADS = 1


pytestmark = pytest.mark.usefixtures("one_thread", "default_matmul_precision")


def cell_of(**axes: Any) -> CellConfig:
    return from_mapping({**SIZE, **axes})


def batch(size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shape = (size, 3, 32, 32)
    return torch.rand(shape, generator=g) * 2 - 1, torch.randn(shape, generator=g), torch.rand(size, generator=g)


def facts_of(cell: CellConfig, trainer: FastTrainer | None = None) -> dict[str, Any]:
    """The ``effective.*`` facts of one traced step, as a measurement gathers them."""
    return _facts(cell, trainer) if trainer else dict(_plain_facts(cell))


@lru_cache
def _plain_facts(cell: CellConfig) -> dict[str, Any]:
    return _facts(cell, trainer_of(cell))


def _facts(cell: CellConfig, trainer: FastTrainer) -> dict[str, Any]:
    trace = trace_step(trainer, batch(cell.batch_size))
    dtype = next(trainer.model.parameters()).dtype
    facts = process_facts(cell) | trace_facts(trace, CompileCounts(0, 0, 0, "off"), dtype)
    return facts | {"effective.compiled_in_window": "yes" if trace.compiled_regions else "no"}


def use_kernel(trainer: FastTrainer, kernel: Callable[..., Tensor]) -> FastTrainer:
    for block in trainer.model.blocks:
        block.attn.kernel = kernel
    return trainer


def wrong(cell: CellConfig, trainer: FastTrainer | None = None) -> list[str]:
    return mismatches(cell, facts_of(cell, trainer), THREADS)


# --- what ran ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "op"),
    [("manual", "manual"), ("sdpa", "sdpa-flash"), ("sdpa-math", "sdpa-math"), ("sdpa-flash", "sdpa-flash"),
     ("sdpa-upcast", "sdpa-flash")],
)  # fmt: skip
def test_the_attention_op_that_ran(kernel: str, op: str):
    facts = facts_of(cell_of(attention=kernel))
    assert facts["effective.attention_op"] == op
    assert mismatches(cell_of(attention=kernel), facts, THREADS) == []


@pytest.mark.parametrize(
    ("precision", "matmul", "autocast", "weights", "fp32"),
    [("fp32", "float32", "off", "float32", "highest"), ("fp32-medium", "float32", "off", "float32", "medium"),
     ("bf16", "bfloat16", "bfloat16", "float32", "highest"), ("fp16", "float16", "float16", "float32", "highest"),
     ("bf16-weights", "bfloat16", "off", "bfloat16", "highest")],
)  # fmt: skip
@pytest.mark.parametrize("kernel", ["manual", "sdpa"])
def test_the_dtypes_that_ran(precision: str, matmul: str, autocast: str, weights: str, fp32: str, kernel: str):
    cell = cell_of(precision=precision, attention=kernel)
    facts = facts_of(cell)
    names = ("matmul_dtype", "autocast_dtype", "weight_dtype", "matmul_precision")
    assert tuple(facts[f"effective.{name}"] for name in names) == (matmul, autocast, weights, fp32)
    assert mismatches(cell, facts, THREADS) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-weights"])
@pytest.mark.parametrize(("asked", "ran"), [("sdpa", "sdpa-upcast"), ("sdpa-upcast", "sdpa")])
def test_sdpa_in_the_dtype_of_the_cell_and_in_fp32_are_told_apart(asked: str, ran: str, precision: str):
    cell = cell_of(attention=asked, precision=precision)
    assert wrong(cell) == []
    found = wrong(cell, use_kernel(trainer_of(cell), kernel_of(ran)))
    dtype = "float32" if ran == "sdpa-upcast" else {"fp16": "float16"}.get(precision, "bfloat16")
    assert found == ([] if precision == "fp32" else [f"attention: asked {asked}, ran on {dtype}"])


@pytest.mark.parametrize(
    ("optimizer", "ran"),
    [("adamw", "adamw-single-tensor"), ("adamw-foreach", "adamw-foreach"), ("adamw-fused", "adamw-fused")],
)
def test_the_optimizer_kernel_that_ran(optimizer: str, ran: str):
    cell = cell_of(optimizer=optimizer)
    facts = facts_of(cell)
    assert facts["effective.optimizer"] == ran
    assert mismatches(cell, facts, THREADS) == []


def test_clipping_alone_does_not_look_like_a_foreach_optimizer():
    trainer = FastTrainer(trainer_of(cell_of()).model, max_grad_norm=1e-3)
    assert trace_step(trainer, batch()).optimizer == "adamw-single-tensor"


@pytest.mark.parametrize(
    "axes",
    [{"qkv": "separate", "adaln": "merged", "patches": "linear"}, {"memory_format": "channels-last"}, {"gelu": "tanh"}],
    ids=str,
)
def test_other_switches_run_as_asked(axes: dict[str, str]):
    assert wrong(cell_of(**axes)) == []


def test_facts_of_the_process():
    facts = process_facts(cell_of())
    assert facts["effective.threads"] == THREADS
    assert facts["effective.nice"] == os.nice(0)
    assert facts["effective.pid"] == os.getpid()
    assert facts["effective.torch"] == torch.__version__
    assert facts["effective.deterministic"] == "algorithms=False"


def test_a_traced_step_is_a_training_step_and_leaves_the_trainer_as_it_was():
    traced, plain = trainer_of(cell_of()), trainer_of(cell_of())
    loss_fn = traced.loss_fn
    trace_step(traced, batch())
    plain.train_step(batch())
    assert traced.loss_fn is loss_fn
    assert traced.steps == 1
    for a, b in zip(traced.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_traced_step_that_fails_leaves_the_trainer_as_it_was():
    trainer = trainer_of(cell_of())
    loss_fn = trainer.loss_fn
    with pytest.raises(RuntimeError):
        trace_step(trainer, (torch.zeros(2, 3, 30, 30), torch.zeros(2, 3, 32, 32), torch.zeros(2)))
    assert trainer.loss_fn is loss_fn


# --- what ran is not what was asked -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "ran", "op"),
    [("sdpa-flash", "sdpa-math", "sdpa-math"), ("sdpa-math", "sdpa-flash", "sdpa-flash"), ("sdpa", "manual", "manual"),
     ("manual", "sdpa", "sdpa-flash"), ("sdpa-upcast", "manual", "manual"), ("flex", "sdpa", "sdpa-flash")],
)  # fmt: skip
def test_attention_that_falls_through_to_another_kernel_is_named(asked: str, ran: str, op: str):
    cell = cell_of(attention=asked)
    assert wrong(cell, use_kernel(trainer_of(cell), kernel_of(ran))) == [f"attention: asked {asked}, ran {op}"]


@pytest.mark.parametrize(
    ("asked", "ran"),
    [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16"), ("fp32", "bf16-weights"), ("fp32", "fp32-medium"),
     ("fp32-medium", "fp32"), ("bf16-weights", "bf16"), ("bf16", "bf16-weights"), ("fp16", "bf16"),
     ("bf16-weights", "fp32")],
)  # fmt: skip
def test_another_precision_is_named(asked: str, ran: str):
    found = wrong(cell_of(precision=asked), trainer_of(cell_of(precision=ran)))
    assert len(found) == 1
    assert found[0].startswith(f"precision: asked {asked}, ran ")


def test_a_precision_mismatch_says_what_ran_in_words_that_differ_from_what_was_asked():
    found = wrong(cell_of(precision="fp32"), trainer_of(cell_of(precision="fp32-medium")))
    assert "medium" in found[0]


def test_autocast_that_is_off_is_named():
    cell = cell_of(precision="bf16")
    trainer = trainer_of(cell)
    trainer.amp_dtype = None
    (words,) = wrong(cell, trainer)
    assert words.startswith("precision: asked bf16, ran float32 matmuls (autocast off")


@pytest.mark.parametrize("asked", ["adamw-fused", "adamw-foreach"])
def test_another_optimizer_kernel_is_named(asked: str):
    found = wrong(cell_of(optimizer=asked), trainer_of(cell_of()))
    assert found == [f"optimizer: asked {asked}, ran adamw-single-tensor"]


def test_other_threads_are_named():
    found = mismatches(cell_of(), facts_of(cell_of()), THREADS + 3)
    assert found == [f"threads: asked {THREADS + 3}, ran {THREADS}"]


@pytest.mark.parametrize(("asked", "ran"), [("default", "no"), ("off", "yes"), ("default", "recompiled")])
def test_compilation_that_did_not_hold_is_named(asked: str, ran: str):
    found = mismatches(cell_of(compile=asked), facts_of(cell_of()) | {"effective.compiled_in_window": ran}, THREADS)
    assert found == [f"compile: asked {asked}, ran {ran}"]


def test_graph_breaks_are_named_where_a_full_graph_was_asked():
    facts = {"effective.graph_breaks": 2, "effective.compiled_in_window": "yes"}
    found = mismatches(cell_of(compile="default", fullgraph="on"), facts_of(cell_of()) | facts, THREADS)
    assert found == ["fullgraph: asked on, ran 2 graph breaks"]
    assert mismatches(cell_of(compile="default"), facts_of(cell_of()) | facts, THREADS) == []


def test_everything_that_is_wrong_is_named():
    cell = cell_of(attention="sdpa", precision="bf16", optimizer="adamw-fused")
    found = mismatches(cell, facts_of(cell_of()), THREADS + 1)
    assert [line.split(":")[0] for line in found] == ["attention", "precision", "optimizer", "threads"]


def test_flex_attention_compiled_by_itself_in_an_eager_model_is_as_asked():
    """Its kernel exists only compiled, so an eager cell has a compiled region in its window."""
    facts = facts_of(cell_of()) | {"effective.attention_op": "flex", "effective.compiled_in_window": "yes"}
    assert mismatches(cell_of(attention="flex"), facts, THREADS) == []


# --- nothing is compiled again in a window ----------------------------------------------------------------


def test_a_recompile_raises_and_known_shapes_do_not():
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    assert double(torch.ones(3)).tolist() == [2, 2, 2]
    with no_recompiles():
        assert double(torch.ones(3)).tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="recompil"):
            double(torch.ones(4))
    before = compile_counts()
    assert double(torch.ones(4)).tolist() == [2, 2, 2, 2]
    after = compile_counts()
    assert (after.recompiles, after.graphs) == (before.recompiles + 1, before.graphs + 1)


def test_a_graph_break_is_counted():
    def broken(x: Tensor) -> Tensor:
        y = 2 * x
        torch._dynamo.graph_break()
        return y + 1

    before = compile_counts()
    torch.compile(broken, backend="eager")(torch.ones(2))
    after = compile_counts()
    assert (after.graphs, after.graph_breaks) == (before.graphs + 2, before.graph_breaks + 1)


@pytest.mark.slow
def test_a_compiled_cell_shows_its_graph_and_refuses_another_shape_in_the_window():
    cell = cell_of(compile="default", batch_size=8)
    trainer, reference = trainer_of(cell), trainer_of(cell_of())
    start = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
    torch._dynamo.reset()  # another test may have compiled this very model
    before = compile_counts()
    for _ in range(2):
        trainer.train_step(batch(8))
    counts = compile_counts()
    assert counts.graphs == before.graphs + 1
    assert counts.graph_breaks == before.graph_breaks
    assert counts.cache in ("cold", "warm", "mixed")
    with no_recompiles():
        facts = facts_of(cell, trainer)
        with pytest.raises(RuntimeError, match="recompil"):
            trainer.train_step(batch(5))
        trainer.restart(start)
        found = compare(trainer, reference, batch(8), "fp32")
    assert mismatches(cell, facts, THREADS) == []
    assert found.ok, found
    assert compile_counts() == counts


@pytest.mark.slow
def test_compiled_math_attention_runs_as_such_or_is_said_to_be_unsupported():
    """Inductor takes the math form apart and may fuse it into another kernel."""
    cell = cell_of(compile="default", attention="sdpa-math")
    try:
        check_capability(cell)
    except Unsupported:
        return
    assert wrong(cell) == []


# --- what cannot run here ---------------------------------------------------------------------------------


def refusal(**axes: Any) -> str:
    with pytest.raises(Unsupported) as error:
        check_capability(cell_of(**axes))
    return str(error.value)


@pytest.mark.parametrize("kernel", ["manual", "sdpa", "sdpa-math", "sdpa-flash", "sdpa-upcast"])
def test_kernels_that_exist_on_every_cpu(kernel: str):
    check_capability(cell_of(attention=kernel))


@pytest.mark.parametrize("kernel", ["sdpa-efficient", "sdpa-cudnn"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuda_backends_of_sdpa_are_refused_on_the_cpu_with_the_reason(kernel: str, precision: str):
    reason = refusal(attention=kernel, precision=precision)
    assert reason.startswith(f"attention {kernel} in {precision} on cpu: ")
    assert len(reason) > len(f"attention {kernel} in {precision} on cpu: ") + 10
    assert "\n" not in reason


@pytest.mark.slow
def test_flex_attention_is_refused_on_the_cpu_with_the_reason():
    assert refusal(attention="flex").startswith("attention flex in fp32 on cpu: ")


@pytest.mark.parametrize(
    ("kernel", "package"), [("flash-attn", "flash_attn"), ("xformers", "xformers"), ("sage", "sageattention")]
)
def test_kernels_of_packages_that_are_not_installed(kernel: str, package: str):
    assert refusal(attention=kernel) == f"attention {kernel}: the package {package} is not installed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_device_that_is_not_there():
    assert refusal(device="cuda") == "device cuda: this machine has no usable CUDA device"


@pytest.mark.parametrize(
    ("axes", "part"),
    [
        ({"optimizer": "adamw-capturable"}, "optimizer adamw-capturable: "),
        ({"cuda_graph": "on"}, "cuda_graph on: needs a CUDA device"),
        ({"compile": "reduce-overhead"}, "compile reduce-overhead: "),
        ({"sampler": "int8"}, "sampler int8: "),
    ],
    ids=str,
)
def test_switches_that_do_nothing_here_are_refused(axes: dict[str, str], part: str):
    assert refusal(**axes).startswith(part)


@pytest.mark.parametrize(
    ("cxx", "part"),
    [("no-such-compiler", "CXX=no-such-compiler does not exist"), ("/bin/false", "cannot build a shared library")],
)
@pytest.mark.parametrize("axes", [{"compile": "default"}, {"attention": "flex"}], ids=str)
def test_a_compiler_that_does_not_work_is_a_reason(
    cxx: str, part: str, axes: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CXX", cxx)
    assert part in refusal(**axes)
    check_capability(cell_of())  # eager cells need none


def test_no_compiler_at_all_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cxx_problem.__wrapped__("").startswith("no C++ compiler")


def test_a_working_compiler_is_no_reason():
    import shutil

    if not shutil.which("g++"):
        pytest.skip("no g++ here")
    assert cxx_problem("g++") == ""


def test_medium_precision_is_supported_exactly_where_it_rounds():
    """The measure: 1 + 2^-12 squared is rounded to bf16 or TF32 inputs, or it is not."""
    torch.set_float32_matmul_precision("medium")
    a = torch.full((64, 64), 1 + 2.0**-12)
    rounds = (a @ a)[0, 0].item() == 64.0
    torch.set_float32_matmul_precision("highest")
    assert (a @ a)[0, 0].item() > 64.0
    assert medium_matmul_rounds("cpu") == rounds
    assert torch.get_float32_matmul_precision() == "highest"
    if rounds:
        check_capability(cell_of(precision="fp32-medium"))
    else:
        assert "fp32-medium" in refusal(precision="fp32-medium")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-weights"])
def test_16_bit_runs_on_this_cpu(precision: str):
    check_capability(cell_of(precision=precision))


# --- correct before fast ----------------------------------------------------------------------------------


def agreement(cell: CellConfig, trainer: FastTrainer | None = None) -> Agreement:
    return compare(trainer or trainer_of(cell), trainer_of(reference_of(cell)), batch(), cell.precision)


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("kernel", ["manual", "sdpa", "sdpa-upcast"])
def test_each_precision_agrees_with_fp32(precision: str, kernel: str):
    found = agreement(cell_of(precision=precision, attention=kernel, dim=64, depth=2))
    assert found.ok, found
    assert found.loss == pytest.approx(found.reference_loss, rel=1e-2)


@pytest.mark.parametrize(
    "axes",
    [{"attention": "sdpa-math"}, {"qkv": "separate"}, {"adaln": "merged"}, {"patches": "linear"},
     {"gelu": "tanh"}, {"memory_format": "channels-last"}, {"optimizer": "adamw-fused"}],
    ids=str,
)  # fmt: skip
def test_each_switch_agrees(axes: dict[str, str]):
    found = agreement(cell_of(**axes))
    assert found.ok, found


def test_tanh_gelu_is_compared_with_itself_and_would_not_agree_with_the_exact_one():
    assert reference_of(cell_of(gelu="tanh", attention="sdpa", precision="bf16")) == cell_of(gelu="tanh")
    found = compare(trainer_of(cell_of(gelu="tanh")), trainer_of(cell_of()), batch(), "fp32")
    assert not found.ok


WRONG_KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "no scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1.0),
    "scaled by the whole width": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=64**-0.5),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "softmax over the wrong axis": lambda q, k, v: (q @ k.mT * q.shape[-1] ** -0.5).softmax(-2) @ v,
    "no attention": lambda q, k, v: v,
    "q and k swapped": lambda q, k, v: attention(k, q, v)[0],
    "no gradient of v": lambda q, k, v: attention(q, k, v.detach())[0],
}


@pytest.mark.parametrize("name", WRONG_KERNELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_wrong_kernel_is_caught(name: str, precision: str):
    cell = cell_of(dim=64, depth=2, precision=precision)
    found = agreement(cell, use_kernel(trainer_of(cell), WRONG_KERNELS[name]))
    assert not found.ok
    assert found.problem


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_scale_that_is_a_little_wrong_is_caught(precision: str):
    cell = cell_of(dim=64, depth=2, precision=precision)
    found = agreement(cell, use_kernel(trainer_of(cell), lambda q, k, v: attention(q * 1.1, k, v)[0]))
    assert not found.ok
    assert found.worst_error > TOLERANCES[precision][1]


def test_other_weights_are_caught():
    found = agreement(cell_of(), trainer_of(cell_of(seed=1)))
    assert "differs from the reference's" in found.problem


class Fixed:
    """A trainer whose loss and gradients are given."""

    def __init__(self, loss: float, **grads: list[float]) -> None:
        self.loss, self.grads = loss, {name: torch.tensor(values) for name, values in grads.items()}

    def gradients(self, _batch: Any) -> tuple[float, dict[str, Tensor]]:
        return self.loss, self.grads


def test_nearly_zero_gradients_are_not_measured_by_their_own_size():
    """A key bias has no gradient but rounding; its relative error is of order one and means nothing."""
    reference = Fixed(1.0, weight=[3.0, 4.0], key_bias=[1e-9, -2e-9])
    assert compare(Fixed(1.0, weight=[3.0, 4.0], key_bias=[-3e-9, 1e-9]), reference, None, "fp32").ok
    found = compare(Fixed(1.0, weight=[3.0, 4.0], key_bias=[0.1, 0.0]), reference, None, "fp32")
    assert (found.ok, found.worst_tensor) == (False, "key_bias")


def test_relative_error_of_a_gradient_by_hand():
    reference = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([6.0, 8.0])}
    name, error = worst_gradient({"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([6.0, 8.5])}, reference)
    assert (name, error) == ("a", pytest.approx(0.1))


@pytest.mark.parametrize("precision", TOLERANCES)
def test_the_tolerance_of_each_precision_is_the_limit(precision: str):
    loss, grad = TOLERANCES[precision]
    reference = Fixed(2.0, w=[1.0, 0.0])
    assert compare(Fixed(2.0 * (1 + 0.9 * loss), w=[1 + 0.9 * grad, 0.0]), reference, None, precision).ok
    assert "loss" in compare(Fixed(2.0 * (1 + 1.1 * loss), w=[1.0, 0.0]), reference, None, precision).problem
    assert "gradient of w" in compare(Fixed(2.0, w=[1 + 1.1 * grad, 0.0]), reference, None, precision).problem


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_never_agrees(bad: float):
    reference = Fixed(1.0, a=[1.0], b=[1.0])
    assert "loss is" in compare(Fixed(bad, a=[1.0], b=[1.0]), reference, None, "bf16").problem
    found = compare(Fixed(1.0, a=[1.0], b=[bad]), reference, None, "bf16")
    assert (found.worst_tensor, found.worst_error) == ("b", math.inf)
    assert "gradient of b" in found.problem
    both = compare(Fixed(1.0, a=[1.0], b=[bad]), Fixed(1.0, a=[1.0], b=[bad]), None, "bf16")
    assert not both.ok


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reference_that_is_not_finite_never_agrees(bad: float):
    assert not compare(Fixed(1.0, a=[1.0]), Fixed(bad, a=[1.0]), None, "bf16").ok
    assert not compare(Fixed(1.0, a=[1.0]), Fixed(1.0, a=[bad]), None, "bf16").ok


def test_a_parameter_without_a_gradient_is_named():
    found = compare(Fixed(1.0, a=[1.0]), Fixed(1.0, a=[1.0], b=[1.0]), None, "fp32")
    assert (found.ok, found.worst_tensor) == (False, "b")


def test_comparing_leaves_both_trainers_as_they_were():
    cell, reference = trainer_of(cell_of(precision="bf16")), trainer_of(cell_of())
    compare(cell, reference, batch(), "bf16")
    assert cell.steps == reference.steps == 0
    for a, b in zip(cell.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(p.grad is None for p in cell.model.parameters())


# --- arithmetic -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [{}, {"attention": "sdpa", "precision": "bf16"}, {"dim": 64, "depth": 3, "heads": 8}])
def test_counted_flops_are_those_of_the_closed_form(axes: dict[str, Any]):
    assert model_gflops_per_step(cell_of(**axes)) == pytest.approx(closed_form_gflops(cell_of(**axes)), rel=1e-9)


def test_flops_grow_with_the_batch():
    small, large = (model_gflops_per_step(cell_of(batch_size=n)) for n in (8, 16))
    assert large == pytest.approx(2 * small)


def test_the_loss_is_the_shared_one():
    assert trainer_of(cell_of()).loss_fn is flow_matching_loss


# --- out of memory in vague words -------------------------------------------------------------------------


@pytest.mark.parametrize(("at_limit", "oom"), [(True, True), (False, False)])
def test_a_vague_error_of_onednn_is_out_of_memory_only_at_the_limit(
    at_limit: bool, oom: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "at_limit", lambda: at_limit)
    assert memory.is_oom(RuntimeError("could not create a primitive")) is oom
    assert not memory.is_oom(ValueError("could not create a primitive"))
