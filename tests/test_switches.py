"""Every value of every axis: it takes effect (seen, not echoed), and the loss and gradients stay the control's."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tinydit_ray.bench.agreement import compare, reference_of
from tinydit_ray.bench.capability import Unsupported, check_capability
from tinydit_ray.bench.effective import (
    StepTrace,
    compile_counts,
    count_host_syncs,
    mismatches,
    no_recompiles,
    process_facts,
    trace_facts,
    trace_step,
)
from tinydit_ray.bench.explain import compiled_part, explain_text
from tinydit_ray.config import AXES, CellConfig, from_mapping
from tinydit_ray.data import BatchStream
from tinydit_ray.model.blocks import gelu_of
from tinydit_ray.process import keep_freed_memory
from tinydit_ray.train import fast, trainer_of

SIZE = {"model": "32/2/2", "batch_size": 8}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="has no CUDA device")
pytestmark = pytest.mark.usefixtures("one_thread", "default_matmul_precision")


def cell_of(**axes: Any) -> CellConfig:
    return from_mapping({**SIZE, **axes})


def batch(size: int = 8, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shape = (size, 3, 32, 32)
    made = torch.rand(shape, generator=g) * 2 - 1, torch.randn(shape, generator=g), torch.rand(size, generator=g)
    return tuple(tensor.to(device) for tensor in made)  # type: ignore[return-value]


def trace(**axes: Any) -> StepTrace:
    return trace_step(trainer_of(cell_of(**axes)), batch())


# --- switches of the model: seen in the ops that ran ------------------------------------------------------


def test_separate_projections_are_three_matmuls_where_there_was_one():
    fused, separate = trace(), trace(qkv="separate")
    assert separate.count("aten::addmm") - fused.count("aten::addmm") == 2 * 2  # two more in each of two blocks


def test_merged_adaln_is_one_matmul_for_all_blocks_and_the_final_layer():
    per_block, merged = trace(), trace(adaln="merged")
    assert per_block.count("aten::addmm") - merged.count("aten::addmm") == 2  # 3 layers in 1 matmul


def test_patches_are_a_convolution_or_none():
    assert trace().count("aten::convolution") > 0
    assert trace(patches="linear").count("aten::convolution") == 0


def test_tanh_gelu_is_another_function():
    x, t = batch()[0], batch()[2]
    exact, tanh = (trainer_of(cell_of(gelu=form)).model(x, t) for form in ("exact", "tanh"))
    assert 1e-7 < (exact - tanh).abs().max() < 1e-3


def test_the_sigmoid_form_of_gelu_is_the_tanh_form():
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    tanh = nn.functional.gelu(x, approximate="tanh")
    assert (gelu_of("tanh-sigmoid")(x.float()).double() - tanh).abs().max() < 1e-6
    assert gelu_of("tanh-sigmoid")(x.bfloat16()).dtype == torch.bfloat16
    assert trace(gelu="tanh-sigmoid").count("aten::gelu") == 0
    assert trace(gelu="tanh").count("aten::gelu") > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-weights"])
def test_the_sigmoid_form_agrees_with_a_tanh_control(precision: str):
    cell = cell_of(gelu="tanh-sigmoid", precision=precision)
    assert reference_of(cell).gelu == "tanh"
    found = compare(trainer_of(cell), trainer_of(reference_of(cell)), batch(), precision)
    assert found.ok, found


def test_channels_last_reaches_the_weights():
    model = trainer_of(cell_of(memory_format="channels-last")).model
    assert model.embed.proj.weight.is_contiguous(memory_format=torch.channels_last)


def test_sdpa_upcast_runs_in_fp32_under_autocast():
    """What it saves is a 16-bit backward; so the kernel must see fp32, and hand back the autocast dtype."""
    seen: list[torch.dtype] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(q.dtype)
        return original(q, k, v)

    trainer = trainer_of(cell_of(attention="sdpa-upcast", precision="bf16"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        trainer.train_step(batch())
    assert seen == [torch.float32] * 2
    assert trace(attention="sdpa-upcast", precision="bf16").matmul_dtype == "bfloat16"


@pytest.mark.parametrize("residual", ["fp32", "autocast"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_residual_stream_has_the_dtype_that_was_asked(residual: str, precision: str):
    cell = cell_of(precision=precision, residual=residual)
    trainer, seen = trainer_of(cell), set()
    for block in trainer.model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
    found = compare(trainer, trainer_of(reference_of(cell)), batch(), precision)
    assert found.ok, found
    assert seen == {torch.float32 if residual == "fp32" else fast.AMP_DTYPES[precision]}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


# --- the compiler: modes, options, scope, shapes ----------------------------------------------------------

COMPILED: dict[str, dict[str, str]] = {
    "default": {},
    "block": {"compile_scope": "block"},
    "fullgraph": {"fullgraph": "on"},
    "static": {"dynamic": "off"},
    "dynamic": {"dynamic": "on"},
    "dynamic, no duck shapes": {"dynamic": "on", "duck_shapes": "off"},
    "bf16, residual stream": {"precision": "bf16", "residual": "autocast"},
    "bf16 weights": {"precision": "bf16-weights"},
    "merged, sigmoid, linear": {
        "adaln": "merged", "gelu": "tanh-sigmoid", "patches": "linear", "optimizer": "adamw-fused",
    },
}


@pytest.fixture
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graph of another test, and a cache of this test's own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def without_inductor(monkeypatch: pytest.MonkeyPatch, backend: str = "eager") -> None:
    """TorchDynamo's graphs, run without Inductor's C++: what is asked here is decided before it."""
    original = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, **how: original(model, **{**how, "mode": None}, backend=backend)
    )


def check_compiled(cell: CellConfig) -> None:
    """The cell agrees with its reference, in one graph without a break, and runs that graph as asked."""
    check_capability(cell)
    before = compile_counts()
    trainer = trainer_of(cell)
    found = compare(trainer, trainer_of(reference_of(cell)), batch(), cell.precision)
    assert found.ok, found
    after = compile_counts()
    assert after.graphs - before.graphs == 1
    assert (after.graph_breaks, after.recompiles) == (before.graph_breaks, before.recompiles)
    with no_recompiles():
        traced = trace_step(trainer, batch())
    facts = process_facts(cell) | trace_facts(traced, after, next(trainer.model.parameters()).dtype)
    facts |= {"effective.compiled_in_window": "yes" if traced.compiled_regions else "no", "effective.graph_breaks": 0}
    assert mismatches(cell, facts, threads=1) == []
    assert traced.compiled_regions >= (2 if cell.compile_scope == "block" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_cell_agrees_runs_compiled_and_is_one_graph(
    name: str, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
):
    without_inductor(monkeypatch)
    check_compiled(cell_of(compile="default", **COMPILED[name]))


@pytest.mark.slow
def test_a_cell_with_every_switch_on_agrees_through_inductor(fresh_compiler: None):
    switches = COMPILED["bf16, residual stream"] | COMPILED["merged, sigmoid, linear"]
    check_compiled(cell_of(compile="default", depth=1, **switches))


@pytest.mark.slow
def test_regional_compilation_gives_the_compiler_one_block_instead_of_the_model(fresh_compiler: None):
    """So its compile time does not grow with the depth: the graph is that of one block, whatever the depth."""
    ops: dict[str, list[int]] = {"model": [], "block": []}
    for scope, found in ops.items():
        for depth in (2, 4):
            cell = cell_of(compile="default", compile_scope=scope, depth=depth)
            text = explain_text(cell, trainer_of(cell), batch())
            assert "Graph Count: 1" in text
            found.append(int(re.search(r"Op Count: (\d+)", text)[1]))  # type: ignore[index]
    assert ops["block"][0] == ops["block"][1]
    assert ops["model"][1] > ops["model"][0] > 2 * ops["block"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dynamic", "duck", "recompiles"), [("off", "on", 1), ("on", "on", 1), ("on", "off", 0)], ids=str
)
def test_dynamic_shapes_and_duck_shapes(
    dynamic: str, duck: str, recompiles: int, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
):
    """32 images of 32 × 32: with duck shaping batch and side are one symbol, so another batch is compiled anew;
    with a symbol each, one graph serves both."""
    without_inductor(monkeypatch)
    trainer = trainer_of(cell_of(compile="default", dynamic=dynamic, duck_shapes=duck))
    trainer.train_step(batch(32))
    before = compile_counts()
    trainer.train_step(batch(16))
    assert compile_counts().recompiles - before.recompiles == recompiles
    assert torch.fx.experimental._config.use_duck_shape, "the process's setting is as it was"


@pytest.mark.slow
def test_automatic_dynamic_shapes_are_static_at_first(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch):
    without_inductor(monkeypatch)
    trainer = trainer_of(cell_of(compile="default"))
    counts = [compile_counts().recompiles]
    for size in (32, 16, 12):
        trainer.train_step(batch(size))
        counts.append(compile_counts().recompiles)
    assert counts[1] == counts[0]
    assert counts[2] > counts[1]
    assert counts[3] == counts[2], "the second graph has a symbol for the batch"


def test_a_full_graph_refuses_a_break(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch):
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x + 1

    without_inductor(monkeypatch)
    assert fast.compile_net(Broken(), fullgraph=False)(torch.zeros(2)).tolist() == [1, 1]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        fast.compile_net(Broken(), fullgraph=True)(torch.zeros(2))


SETTINGS = {
    ("default", "none"): {},
    ("default", "coordinate-descent"): {"coordinate_descent_tuning": True},
    ("default", "epilogue-fusion"): {"epilogue_fusion": True, "max_autotune_gemm": True},
    ("default", "conv-1x1-as-mm"): {"conv_1x1_as_mm": True},
    ("max-autotune", "none"): {"max_autotune": True, "coordinate_descent_tuning": True, "triton.cudagraphs": True},
    ("max-autotune-no-cudagraphs", "none"): {"max_autotune": True, "coordinate_descent_tuning": True},
    ("reduce-overhead", "none"): {"triton.cudagraphs": True},
    ("max-autotune", "conv-1x1-as-mm"): {
        "max_autotune": True, "coordinate_descent_tuning": True, "conv_1x1_as_mm": True, "triton.cudagraphs": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "options"), SETTINGS, ids=str)
def test_modes_and_option_sets_reach_inductor(
    mode: str, options: str, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
):
    """The settings that Inductor works under while it compiles, against those of a plain default compilation."""
    from torch._inductor import compile_fx, config

    names = {name for wanted in SETTINGS.values() for name in wanted}
    seen: list[dict[str, Any]] = []

    original = compile_fx.fx_codegen_and_compile

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append({name: getattr(config.triton if "." in name else config, name.split(".")[-1]) for name in names})
        return original(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", spy)
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):
        for how in ({"mode": "default"}, {"mode": mode, "inductor": options}):
            torch._dynamo.reset()
            fast.compile_net(nn.Linear(3, 3), **how)(torch.zeros(2, 3))  # type: ignore[arg-type]
    plain, asked = seen
    wanted = SETTINGS[mode, options]
    assert {name: asked[name] for name in wanted} == wanted
    differing = {name for name in names if asked[name] != plain[name]}
    assert differing <= wanted.keys()
    assert bool(differing) == (bool(wanted)), "a set that changes nothing is no switch"


def test_every_inductor_set_names_options_that_exist():
    assert set(fast.INDUCTOR_OPTIONS) == set(AXES["inductor"].metadata["values"])
    known = torch._inductor.list_options()
    assert {name for options in fast.INDUCTOR_OPTIONS.values() for name in options} <= set(known)


@pytest.mark.slow
def test_explain_says_what_was_compiled_and_why_again(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch):
    without_inductor(monkeypatch)
    cell = cell_of(compile="default", dynamic="off")
    trainer = trainer_of(cell)
    for size in (8, 4):
        trainer.train_step(batch(size))
    text = explain_text(cell, trainer, batch())
    assert "forward," in text
    assert "guards" in text
    assert "size mismatch" in text, "the reason of the recompilation"
    assert "Graph Break Count: 0" in text


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-weights"])
@pytest.mark.parametrize("scope", ["model", "block"])
def test_the_part_that_is_explained_is_the_part_that_is_compiled(scope: str, precision: str):
    cell = cell_of(compile="default", compile_scope=scope, precision=precision)
    trainer = trainer_of(cell)
    forward, inputs = compiled_part(cell, trainer, batch())
    assert forward.__self__ is (trainer.model if scope == "model" else trainer.model.blocks[0])
    with trainer.autocast():
        assert forward(*inputs).isfinite().all()


# --- memory of the process --------------------------------------------------------------------------------

FAULTS = """
import sys, torch
from tinydit_ray.process import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "keep" else "default")
torch.set_num_threads(1)
from tinydit_ray.bench.memory import page_faults
from tinydit_ray.config import from_mapping
from tinydit_ray.train import trainer_of
n = 64
batch = torch.ones(n, 3, 32, 32), torch.zeros(n, 3, 32, 32), torch.zeros(n)
trainer = trainer_of(from_mapping({"model": "micro"}))
losses, faults = [], []
for _ in range(15):
    before = page_faults()
    losses.append(trainer.train_step(batch).item())
    faults.append(page_faults() - before)
print(sorted(faults[6:])[4])
print(losses)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc's malloc")
def test_a_process_that_keeps_freed_memory_takes_no_page_faults_and_changes_no_number():
    """Of the last 9 steps the median; 100 faults are 0.4 MB, and one activation of this cell is 1 MB."""
    found = {}
    for how in ("default", "keep"):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        found[how] = done.stdout.splitlines()
    assert found["default"][0] == "default"
    assert found["keep"][0] == "keeps freed memory"
    assert int(found["keep"][1]) < 100
    assert found["keep"][2] == found["default"][2]


def test_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "1.2"))
    assert keep_freed_memory() == "default"


# --- the step on the device: nothing waits, nothing travels -----------------------------------------------


def test_a_training_loop_asks_the_device_for_nothing_between_its_logs(monkeypatch: pytest.MonkeyPatch):
    """20 steps of ``fit`` with batches from the stream: the only value that is asked for is the logged loss."""
    asked: list[str] = []

    def spy(name: str) -> None:
        original = getattr(Tensor, name)

        def spied(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if not caller.startswith("torch.optim"):  # its step counters live on the host
                asked.append(f"{name} in {caller}")
            return original(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, spied)

    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    stream = BatchStream(images, 8, seed=0)
    trainer = trainer_of(cell_of(precision="bf16"))
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        spy(name)
    trainer.fit(stream, 20, log_every=10)
    assert asked == ["item in tinydit_ray.train.fast"] * 2  # the mean loss, over all workers


@needs_cuda
def test_images_live_on_the_gpu_and_a_step_with_its_batch_never_waits():
    images = torch.randint(0, 256, (256, 3, 32, 32), dtype=torch.uint8)
    stream = BatchStream(images, 32, seed=0, device="cuda")
    trainer = trainer_of(cell_of(device="cuda", precision="bf16", optimizer="adamw-fused", batch_size=32))
    made = next(stream)
    assert {tensor.device.type for tensor in made} == {"cuda"}
    trainer.train_step(made)
    assert count_host_syncs(lambda: trainer.train_step(next(stream))) == 0
    assert count_host_syncs(lambda: trainer.train_step(next(stream)).item()) == 1


# --- the whole step as one CUDA graph ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "reason"),
    [({}, "cuda_graph on: needs a CUDA device, the cell asks for cpu"),
     ({"optimizer": "adamw-fused"}, "cuda_graph on: needs a CUDA device")],
    ids=str,
)  # fmt: skip
def test_a_cuda_graph_on_the_cpu_is_refused_with_the_reason(axes: dict[str, str], reason: str):
    with pytest.raises(Unsupported, match=reason):
        check_capability(cell_of(cuda_graph="on", **axes))


@needs_cuda
@pytest.mark.parametrize(
    ("axes", "reason"),
    [({"precision": "fp16"}, "loss scaler"), ({"compile": "reduce-overhead"}, "graphs of its own"),
     ({"compile": "max-autotune"}, "graphs of its own")],
    ids=str,
)  # fmt: skip
def test_what_does_not_go_into_one_graph_is_refused(axes: dict[str, str], reason: str):
    with pytest.raises(Unsupported, match=reason):
        check_capability(cell_of(device="cuda", cuda_graph="on", **axes))


@needs_cuda
@pytest.mark.parametrize("optimizer", ["adamw", "adamw-foreach", "adamw-fused", "adamw-capturable"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_replayed_step_trains_as_an_eager_one(optimizer: str, precision: str):
    how = {"device": "cuda", "optimizer": optimizer, "precision": precision}
    eager, graphed = trainer_of(cell_of(**how)), trainer_of(cell_of(**how, cuda_graph="on"))
    start = {name: tensor.clone() for name, tensor in graphed.model.state_dict().items()}
    losses = [[trainer.train_step(batch(device="cuda")) for _ in range(5)] for trainer in (eager, graphed)]
    assert torch.allclose(torch.stack(losses[0]), torch.stack(losses[1]), rtol=1e-4)
    assert graphed.steps == 5
    assert len({loss.item() for loss in losses[1]}) == 5, "each replay has a loss of its own"
    graphed.restart(start)
    again = [graphed.train_step(batch(device="cuda")) for _ in range(5)]
    assert torch.equal(torch.stack(again), torch.stack(losses[1])), "a restart begins from step 0"


@needs_cuda
def test_a_graphed_step_is_one_launch_and_refuses_another_shape():
    trainer = trainer_of(cell_of(device="cuda", cuda_graph="on"))
    trainer.train_step(batch(device="cuda"))
    traced = trace_step(trainer, batch(device="cuda"))
    assert (traced.cuda_graph, traced.host_syncs, traced.attention_op) == ("whole step", 0, "manual")
    with pytest.raises(ValueError, match="captured for a batch of"):
        trainer.train_step(batch(4, device="cuda"))


def test_an_eager_step_is_no_graph_and_a_cell_that_asked_for_one_is_named():
    cell = cell_of()
    facts = process_facts(cell) | trace_facts(trace(), compile_counts(), torch.float32)
    facts |= {"effective.compiled_in_window": "no", "effective.graph_breaks": 0}
    assert facts["effective.cuda_graph"] == "off"
    assert mismatches(cell_of(cuda_graph="on"), facts, threads=1) == ["cuda_graph: asked on, ran off"]
