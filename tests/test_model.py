"""The model: sizes, names, what each part computes, and that every equal way of computing it is equal."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinydit_ray.model import (
    DiTBlock,
    MultiHeadAttention,
    PatchEmbed,
    PosEmbed2D,
    TimestepEmbedding,
    TinyDiT,
    TinyDiTConfig,
    attention,
    build_model,
    modulate,
    sinusoidal_embedding,
    unpatchify,
)
from tinydit_ray.model.attention import kernel_of

SMALL = {"dim": 32, "depth": 2, "num_heads": 4}
EQUAL_SWITCHES = (
    {"attention": "sdpa"},
    {"attention": "sdpa-math"},
    {"attention": "sdpa-flash"},
    {"attention": "sdpa-upcast"},
    {"qkv": "separate"},
    {"adaln": "merged"},
    {"patches": "linear"},
    {"attention": "sdpa", "qkv": "separate", "adaln": "merged", "patches": "linear"},
)
ALL_SWITCHES = (*EQUAL_SWITCHES, {"gelu": "tanh"}, {"attention": "flex"}, {"attention": "flash-attn"})


pytestmark = pytest.mark.usefixtures("one_thread")


def small(**switches: str) -> TinyDiT:
    return build_model(TinyDiTConfig(**SMALL, **switches), seed=0)


def inputs(n: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, 32, 32, generator=generator), torch.rand(n, generator=generator)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def switch_id(switches: dict[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in switches.items())


# --- sizes and names --------------------------------------------------------------------------------------


def test_parameter_counts_of_the_tiny_size():
    with torch.device("meta"):
        model = TinyDiT(TinyDiTConfig(dim=128, depth=4, num_heads=4))
    parts = {name: count(part) for name, part in model.named_children()}
    assert parts == {"embed": 6_272, "pos": 2_048, "t_embed": 49_408, "blocks": 1_055_232, "final": 39_216}
    assert count(model) == 1_152_176


def test_parameter_counts_of_the_base_size():
    with torch.device("meta"):
        model = TinyDiT(TinyDiTConfig())
    assert (model.cfg.dim, model.cfg.depth, model.cfg.num_heads) == (256, 6, 4)
    assert count(model) == 6_603_568
    assert count(model.blocks[0]) == 1_051_904
    assert count(model.blocks[0].adaLN) == 263_168
    assert count(model.t_embed) == 131_584


def test_names_of_the_children():
    model = small()
    assert [name for name, _ in model.named_children()] == ["embed", "pos", "t_embed", "blocks", "final"]
    assert [name for name, _ in model.blocks[1].named_children()] == ["norm1", "attn", "norm2", "mlp", "adaLN"]


@pytest.mark.parametrize("switches", ALL_SWITCHES, ids=switch_id)
def test_no_switch_changes_the_parameters(switches: dict[str, str]):
    plain, switched = small().state_dict(), small(**switches).state_dict()
    assert list(plain) == list(switched)
    assert all(torch.equal(plain[name], switched[name]) for name in plain)


def test_the_seed_decides_the_weights_and_nothing_global_moves():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = small().state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert all(torch.equal(a, b) for a, b in zip(first.values(), small().state_dict().values(), strict=True))
    other = build_model(TinyDiTConfig(**SMALL), seed=1).state_dict()
    assert not torch.equal(first["embed.proj.weight"], other["embed.proj.weight"])


@pytest.mark.parametrize("patches", ["conv", "linear"])
def test_shapes(patches: str):
    x, t = inputs(3)
    assert small(patches=patches)(x, t).shape == (3, 3, 32, 32)
    other = TinyDiTConfig(
        dim=16, depth=1, num_heads=2, image_size=12, patch_size=2, channels=1, patches=patches
    )
    grey = TinyDiT(other)
    assert grey(torch.randn(2, 1, 12, 12), torch.rand(2)).shape == (2, 1, 12, 12)


@pytest.mark.parametrize(
    "size",
    [
        {"dim": 10, "num_heads": 4},
        {"dim": 33, "num_heads": 3},
        {"dim": 0},
        {"dim": -128},
        {"depth": 0},
        {"num_heads": 0},
        {"image_size": 30},
        {"patch_size": 5},
        {"patch_size": 0},
        {"channels": 0},
    ],
    ids=str,
)
def test_impossible_sizes_are_refused(size: dict[str, int]):
    with pytest.raises(ValueError, match=r"\d"):
        TinyDiTConfig(**size)


def test_attention_alone_refuses_a_width_its_heads_do_not_divide():
    with pytest.raises(ValueError, match="10 is not divisible by heads 4"):
        MultiHeadAttention(10, 4)


def test_the_config_has_no_slots():
    assert vars(TinyDiTConfig(dim=32))["dim"] == 32


# --- initialisation ---------------------------------------------------------------------------------------


def test_every_layer_has_pytorchs_default_initialisation():
    """Uniform within ±1/sqrt(fan_in) for weight and bias; no layer starts at zero (no adaLN-Zero)."""
    layers = [m for m in build_model(TinyDiTConfig(dim=128, depth=2), seed=3).modules() if hasattr(m, "weight")]
    layers = [m for m in layers if m.weight is not None]
    assert len(layers) == 1 + 2 + 2 * 5 + 2
    for layer in layers:
        bound = 1 / math.sqrt(layer.weight[0].numel())
        for values in (layer.weight.detach(), layer.bias.detach()):
            assert values.abs().max() <= bound * 1.0001
            assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.25)


def test_positions_start_as_a_small_normal():
    pos = PosEmbed2D(256, 8)
    values = torch.cat([pos.row, pos.col]).detach()
    assert pos.row.shape == pos.col.shape == (8, 256)
    assert 0.005 < values.std() < 0.05
    assert values.mean().abs() < 0.002
    kurtosis = ((values - values.mean()) / values.std()).pow(4).mean().item()
    assert kurtosis == pytest.approx(3, abs=0.4)  # 1.8 if it were uniform


def test_layer_norms_have_no_parameters_and_torchs_eps():
    norms = [m for m in small().modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 5
    for norm in norms:
        assert norm.eps == 1e-5
        assert not list(norm.parameters())


# --- time -------------------------------------------------------------------------------------------------


def test_first_time_features_at_one_half():
    features = sinusoidal_embedding(torch.tensor([0.5]))
    assert features.shape == (1, 256)
    assert features[0, :4].tolist() == pytest.approx([-0.884, 0.946, 0.849, 0.699], abs=5e-4)


def test_time_features_against_float64():
    t = np.linspace(0, 1, 41)
    angles = 1000 * t[:, None] * 10000.0 ** (-np.arange(128) / 128)
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    features = sinusoidal_embedding(torch.tensor(t, dtype=torch.float32))
    assert np.abs(features.numpy() - expected).max() < 5e-4  # an fp32 angle of 1000 is good to 6e-5


@pytest.mark.parametrize(("a", "b", "similarity"), [(0, 0.01, 0.68), (0, 0.5, 0.27), (0, 1, 0.19), (0.01, 1, 0.16)])
def test_similarity_of_time_features(a: float, b: float, similarity: float):
    first, second = sinusoidal_embedding(torch.tensor([a, b], dtype=torch.float32))
    assert F.cosine_similarity(first, second, dim=0).item() == pytest.approx(similarity, abs=0.005)


def test_time_features_stay_fp32_under_autocast_and_for_16_bit_times():
    t = torch.tensor([0.5, 0.25])  # both exact in bf16
    plain = sinusoidal_embedding(t)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sinusoidal_embedding(t), plain)
    assert torch.equal(sinusoidal_embedding(t.bfloat16()), plain)


def test_time_embedding_is_linear_silu_linear():
    embed = TimestepEmbedding(32)
    t = torch.rand(5)
    first, second = embed.mlp[0], embed.mlp[2]
    hidden = sinusoidal_embedding(t).double() @ first.weight.double().T + first.bias.double()
    hidden = hidden / (1 + torch.exp(-hidden))
    expected = hidden @ second.weight.double().T + second.bias.double()
    torch.testing.assert_close(embed(t).double(), expected, atol=1e-5, rtol=0)


def test_t_changes_a_block_while_its_normalised_input_is_equal():
    model, (x, _) = small(), inputs()
    seen: dict[str, list[Tensor]] = {"norm1": [], "block": []}
    model.blocks[0].norm1.register_forward_hook(lambda _m, _i, out: seen["norm1"].append(out))
    model.blocks[0].register_forward_hook(lambda _m, _i, out: seen["block"].append(out))
    with torch.no_grad():
        early, late = model(x, torch.full((4,), 0.1)), model(x, torch.full((4,), 0.9))
    assert torch.equal(*seen["norm1"])
    assert (seen["block"][0] - seen["block"][1]).abs().max() > 1e-2
    assert (early - late).abs().max() > 1e-3


@pytest.mark.parametrize("adaln", ["per-block", "merged"])
def test_a_sample_depends_on_its_own_time_and_pixels_alone(adaln: str):
    model, (x, t) = small(adaln=adaln), inputs()
    other_t, other_x = t.clone(), x.clone()
    other_t[1], other_x[2, 0, 0, 0] = 0.99, 5.0
    with torch.no_grad():
        change = (model(other_x, other_t) - model(x, t)).abs().amax(dim=(1, 2, 3))
    assert change[[0, 3]].max() < 1e-6
    assert change[[1, 2]].min() > 1e-4


# --- parts against independent computations ---------------------------------------------------------------


def test_attention_against_float64():
    q, k, v = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0))
    out, weights = attention(q, k, v)
    scores = np.einsum("nhid,nhjd->nhij", q.double().numpy(), k.double().numpy()) / math.sqrt(8)
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(weights.numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(out.numpy(), np.einsum("nhij,nhjd->nhid", expected, v.double().numpy()), atol=1e-5)


@pytest.mark.parametrize("name", ["sdpa", "sdpa-math", "sdpa-flash", "sdpa-upcast"])
def test_every_kernel_is_the_hand_written_attention(name: str):
    q, k, v = 2 * torch.randn(3, 2, 4, 64, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(kernel_of(name)(q, k, v), attention(q, k, v)[0], atol=1e-5, rtol=0)


def test_upcast_attention_computes_in_fp32_and_answers_in_the_dtype_it_got():
    q, k, v = torch.randn(3, 2, 4, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = kernel_of("sdpa-upcast")(q, k, v)
    assert out.dtype == torch.bfloat16
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    rounded = exact.bfloat16()  # one rounding at the end, none within
    assert (out != rounded).float().mean() < 0.01


@pytest.mark.parametrize("qkv", ["fused", "separate"])
def test_multi_head_attention_against_torchs_own(qkv: str):
    ours = MultiHeadAttention(32, 4, qkv=qkv)
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    theirs.load_state_dict(
        {"in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias,
         "out_proj.weight": ours.proj.weight, "out_proj.bias": ours.proj.bias}
    )  # fmt: skip
    x = torch.randn(3, 10, 32)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0], atol=1e-5, rtol=0)


def test_modulate_scales_and_shifts_every_token_alike():
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    out = modulate(x, shift=torch.tensor([[10.0, 20.0]]), scale=torch.tensor([[1.0, -1.0]]))
    assert out.tolist() == [[[12.0, 20.0], [16.0, 20.0]]]


def test_a_block_is_two_residuals_of_modulated_norms():
    block = DiTBlock(32, 4)
    x, c = torch.randn(2, 6, 32), torch.randn(2, 32)
    shift1, scale1, shift2, scale2 = (c * c.sigmoid() @ block.adaLN[1].weight.T + block.adaLN[1].bias).split(32, dim=1)

    def norm(z: Tensor) -> Tensor:
        return (z - z.mean(-1, keepdim=True)) / (z.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()

    middle = x + block.attn(norm(x) * (1 + scale1[:, None]) + shift1[:, None])
    expected = middle + block.mlp(norm(middle) * (1 + scale2[:, None]) + shift2[:, None])
    torch.testing.assert_close(block(x, c), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("gelu", ["exact", "tanh"])
def test_gelu_forms_against_float64(gelu: str):
    mlp = small(gelu=gelu).blocks[0].mlp.double()
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    hidden = x @ mlp.net[0].weight.T + mlp.net[0].bias
    inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
    half = torch.tanh(inner) if gelu == "tanh" else torch.erf(hidden / math.sqrt(2))
    expected = (0.5 * hidden * (1 + half)) @ mlp.net[2].weight.T + mlp.net[2].bias
    torch.testing.assert_close(mlp(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("patches", ["conv", "linear"])
def test_unpatchify_inverts_the_patch_cut(patches: str):
    embed = PatchEmbed(48, patches=patches)
    with torch.no_grad():
        embed.proj.weight.copy_(torch.eye(48).reshape(48, 3, 4, 4))
        embed.proj.bias.zero_()
        x, _ = inputs()
        tokens = embed(x)
    assert tokens.shape == (4, 64, 48)
    assert torch.equal(tokens[0, 9].reshape(3, 4, 4), x[0, :, 4:8, 4:8])  # token 9: second row, second column
    assert torch.equal(unpatchify(tokens), x)


def test_positions_add_a_row_and_a_column_vector():
    pos = PosEmbed2D(6, 8)
    out = pos(torch.zeros(1, 64, 6))
    assert torch.equal(out[0, 8 * 3 + 5], pos.row[3] + pos.col[5])


# --- equal ways of computing it ---------------------------------------------------------------------------


@pytest.mark.parametrize("switches", EQUAL_SWITCHES, ids=switch_id)
def test_switches_do_not_change_the_function_nor_its_gradients(switches: dict[str, str]):
    plain, switched, (x, t) = small(), small(**switches), inputs()
    outputs = [model(x, t) for model in (plain, switched)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5
    for out in outputs:
        out.square().mean().backward()
    for (name, p), q in zip(plain.named_parameters(), switched.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() < 1e-5, name


def test_the_short_form_of_sdpa_is_the_sdpa_kernel():
    torch.manual_seed(0)
    model = TinyDiT(TinyDiTConfig(**SMALL), use_sdpa=True)
    assert {block.attn.kernel_name for block in model.blocks} == {"sdpa"}
    assert TinyDiT(TinyDiTConfig(**SMALL)).blocks[0].attn.kernel_name == "manual"


def test_tanh_gelu_changes_the_function_a_little():
    x, t = inputs()
    with torch.no_grad():
        change = (small(gelu="tanh")(x, t) - small()(x, t)).abs().max()
    assert 1e-6 < change < 1e-2


# --- autocast and compilation -----------------------------------------------------------------------------


def test_cpu_autocast_runs_the_matmuls_in_bf16_and_leaves_the_weights_alone():
    model, (x, t) = small(), inputs()
    seen: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _i, out, name=name: seen.update({name: out.dtype}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x, t)
        _, weights = attention(*torch.randn(3, 1, 2, 8, 8))
    assert set(seen.values()) == {torch.bfloat16}
    assert len(seen) == 2 + 2 * 5 + 2
    assert weights.dtype == torch.bfloat16  # so the softmax ran in bf16
    assert out.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (out.float() - model(x, t)).abs().max() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "switches", [{}, {"attention": "sdpa"}, {"adaln": "merged", "qkv": "separate", "patches": "linear"}], ids=switch_id
)
def test_the_whole_model_is_one_graph(switches: dict[str, str]):
    explained = torch._dynamo.explain(small(**switches))(*inputs())
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@pytest.mark.slow
def test_the_compiled_model_is_the_eager_one():
    torch._dynamo.reset()
    model, (x, t) = build_model(TinyDiTConfig(dim=32, depth=1), seed=0), inputs(8)
    assert (torch.compile(model)(x, t) - model(x, t)).abs().max() < 1e-4
