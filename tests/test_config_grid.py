"""Settings and grid files: what they resolve to, and one clear line for whatever a person gets wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tinydit_ray.config import (
    ADDED_LATER,
    AXES,
    AXIS_NAMES,
    COMPILE_ONLY,
    PRESETS,
    CellConfig,
    cell_name,
    control_of,
    from_mapping,
    short_hash,
)
from tinydit_ray.grid import Grid, GridError, load_grid, parse_grid, parse_sets, varying_axes

WORD_AXES = {name: axis.metadata["values"] for name, axis in AXES.items() if "values" in axis.metadata}


def cells_of(text: str, sets: dict[str, list[Any]] | None = None, **defaults: Any) -> list[CellConfig]:
    return parse_grid(text).resolve(defaults, sets or {})[0]


# --- one configuration ------------------------------------------------------------------------------------


def test_axes_and_literals_of_the_specification():
    assert WORD_AXES["precision"] == ("fp32", "fp32-medium", "bf16", "fp16", "bf16-weights")
    assert WORD_AXES["compile"] == (
        "off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs",
    )  # fmt: skip
    assert set(WORD_AXES["attention"]) == {
        "manual", "sdpa", "sdpa-math", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "sdpa-upcast", "flex",
        "flash-attn", "xformers", "sage",
    }  # fmt: skip
    assert WORD_AXES["compile_scope"] == ("model", "block")
    assert WORD_AXES["fullgraph"] == WORD_AXES["cuda_graph"] == ("off", "on")
    assert WORD_AXES["dynamic"] == ("auto", "off", "on")
    assert WORD_AXES["qkv"] == ("fused", "separate")
    assert WORD_AXES["gelu"][:2] == ("exact", "tanh")
    assert WORD_AXES["adaln"] == ("per-block", "merged")
    assert WORD_AXES["patches"] == ("conv", "linear")
    assert {"adamw-foreach", "adamw-fused", "adamw-capturable"} <= set(WORD_AXES["optimizer"])
    assert WORD_AXES["sampler"] == ("eager", "compiled", "bf16", "int8")
    assert {"inductor", "memory_format", "batch_size", "workers", "seed", "dim", "depth", "heads"} <= AXES.keys()
    assert PRESETS["tiny"] == (128, 4, 4)
    assert PRESETS["base"] == (256, 6, 4)


def test_nothing_set_is_the_plain_cell():
    cell = from_mapping({})
    assert (cell.attention, cell.precision, cell.compile) == ("manual", "fp32", "off")
    assert (cell.batch_size, cell.lr, cell.max_grad_norm) == (128, 3e-4, 1.0)
    assert control_of(cell) == cell


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_and_its_sizes_are_one_cell(preset: str):
    dim, depth, heads = PRESETS[preset]
    forms = [
        {"model": preset},
        {"dim": dim, "depth": depth, "heads": heads},
        {"model": f"{dim}/{depth}/{heads}"},
        {"heads": str(heads), "depth": f"{depth}", "dim": float(dim)},
    ]
    cells = [from_mapping(form) for form in forms]
    assert len({cell.config_id for cell in cells}) == 1
    assert {cell.model for cell in cells} == {preset}


def test_sizes_refine_a_preset():
    cell = from_mapping({"model": "tiny", "dim": 64})
    assert (cell.dim, cell.depth, cell.heads, cell.model) == (64, 4, 4, "64/4/4")


def test_config_id_is_stable():
    """Records of other days are matched by it: a change here orphans them all."""
    assert from_mapping({"attention": "sdpa", "precision": "bf16"}).config_id == "3c552bd39756"
    assert short_hash({"b": 1, "a": [1.5, "ü"]}) == "952ca8209cb2"


def test_every_axis_is_part_of_the_config_id():
    plain, compiled = from_mapping({}), from_mapping({"compile": "default"})
    for name, values in WORD_AXES.items():
        base = compiled if name in COMPILE_ONLY else plain
        base = base.replace(dynamic="on") if name == "duck_shapes" else base
        base = base.replace(precision="bf16") if name == "residual" else base
        assert base.replace(**{name: values[1]}).config_id != base.config_id, name
    numbers = {name: 2 for name in AXES if name not in WORD_AXES}
    numbers |= {"dim": 64, "heads": 2, "lr": 1e-3, "network": "nets:own"}
    for name, value in numbers.items():
        assert plain.replace(**{name: value}).config_id != plain.config_id, name


def test_an_axis_added_later_leaves_the_ids_of_older_records_alone():
    assert set(ADDED_LATER) <= AXES.keys()
    older = {name: value for name, value in from_mapping({"seed": 3}).asdict().items() if name not in ADDED_LATER}
    assert from_mapping({"seed": 3}).config_id == short_hash(older)


def test_a_residual_stream_in_autocast_without_autocast_is_refused():
    for precision in ("fp32", "fp32-medium", "bf16-weights"):
        with pytest.raises(ValueError, match=f"residual: 'autocast' has no effect in precision {precision}"):
            from_mapping({"precision": precision, "residual": "autocast"})


def test_in_a_product_the_residual_stream_is_no_axis_of_fp32():
    cells = cells_of("axes: {precision: [fp32, bf16], residual: [fp32, autocast]}")
    assert [(c.precision, c.residual) for c in cells] == [
        ("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "autocast"),
    ]  # fmt: skip


def test_duck_shapes_without_dynamic_shapes_are_refused():
    with pytest.raises(ValueError, match="duck_shapes: 'off' has no effect while dynamic is not on"):
        from_mapping({"compile": "default", "duck_shapes": "off"})


@pytest.mark.parametrize("axis", COMPILE_ONLY)
def test_a_compiler_switch_without_a_compiler_is_refused(axis: str):
    with pytest.raises(ValueError, match=f"{axis}: .* has no effect while compile is off"):
        from_mapping({axis: WORD_AXES[axis][1]})


def test_the_way_a_number_is_written_does_not_matter():
    assert from_mapping({"lr": 1}).config_id == from_mapping({"lr": "1.0"}).config_id
    assert from_mapping({"batch_size": 64.0}).config_id == from_mapping({"batch_size": "64"}).config_id
    assert from_mapping({"max_grad_norm": "off"}).config_id == from_mapping({"max_grad_norm": 0}).config_id


def test_large_whole_numbers_keep_every_digit():
    for seed in (2**53 + 1, str(2**53 + 1)):
        assert from_mapping({"seed": seed}).seed == 2**53 + 1


def test_columns_hold_every_axis_with_its_own_type():
    columns = from_mapping({"batch_size": "16"}).columns()
    assert columns.keys() == {f"config.{name}" for name in AXIS_NAMES}
    assert columns["config.model"] == "tiny"
    assert columns["config.compile"] == "off"
    for name, value in columns.items():
        axis = AXES.get(name.removeprefix("config."))
        assert type(value) is (str if axis is None else type(axis.default)), name


MISTAKES = {
    "unknown axis": ({"attentoin": "sdpa"}, "unknown axis 'attentoin' (did you mean 'attention'?)"),
    "nothing near": ({"zzzz": 1}, "unknown axis 'zzzz'; known: "),
    "unknown word": ({"precision": "fp23"}, "precision: 'fp23' is not possible (did you mean 'fp32'?)"),
    "a number for a word": ({"attention": 3}, "attention: 3 is not a word"),
    "a truth value for a word": ({"compile": True}, "compile: True is not a word"),
    "a word for a number": ({"batch_size": "many"}, "batch_size: 'many' is not a whole number"),
    "a fraction": ({"batch_size": 1.5}, "batch_size: 1.5 is not a whole number"),
    "a truth value for a number": ({"seed": True}, "seed: True is not a whole number"),
    "nothing for a number": ({"lr": None}, "lr: None is not a number"),
    "a list": ({"dim": [32]}, "dim: [32] is not a whole number"),
    "zero": ({"batch_size": 0}, "batch_size: 0 is not possible; a number of at least 1"),
    "below zero": ({"lr": -1}, "lr: -1.0 is not possible"),
    "endless": ({"lr": "inf"}, "lr: inf is not possible"),
    "not a number": ({"lr": "nan"}, "lr: nan is not possible"),
    "endless seed": ({"seed": 1e999}, "seed: inf is not a whole number"),
    "heads": ({"dim": 66, "heads": 4}, "dim 66 is not divisible by heads 4"),
    "odd": ({"dim": 33, "heads": 3}, "dim 33 is odd"),
    "workers": ({"batch_size": 9, "workers": 2}, "batch_size 9 is not divisible by workers 2"),
    "model": ({"model": "tinny"}, "model: 'tinny' is not one of micro, tiny"),
    "a list for a model": ({"model": ["tiny"]}, "model: ['tiny'] is not one of"),
    "a map for a model": ({"model": {"dim": 32}}, "model: {'dim': 32} is not one of"),
    "model sizes": ({"model": "66/4/4"}, "dim 66 is not divisible by heads 4"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_setting_is_named(mistake: str):
    values, message = MISTAKES[mistake]
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is compared below)
        from_mapping(values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_cell_cannot_be_changed():
    with pytest.raises(AttributeError):
        from_mapping({}).dim = 64  # type: ignore[misc]


def test_replacing_checks_and_refines():
    cell = from_mapping({"model": "tiny"})
    assert cell.replace(dim=64).model == "64/4/4"
    with pytest.raises(ValueError, match="fp31"):
        cell.replace(precision="fp31")


def test_replacing_the_model_replaces_its_size():
    assert from_mapping({"model": "tiny"}).replace(model="base").model == "base"


def test_the_control_has_the_cells_size_batch_and_seed_and_the_plain_rest():
    cell = from_mapping(
        {"attention": "sdpa", "precision": "bf16", "compile": "default", "compile_scope": "block", "qkv": "separate",
         "gelu": "tanh", "adaln": "merged", "patches": "linear", "memory_format": "channels-last",
         "optimizer": "adamw-fused", "dim": 64, "depth": 2, "batch_size": 32, "seed": 5, "lr": 1e-3,
         "cpus_per_worker": 2, "max_grad_norm": 0}
    )  # fmt: skip
    expected = from_mapping(
        {"dim": 64, "depth": 2, "batch_size": 32, "seed": 5, "lr": 1e-3, "cpus_per_worker": 2, "max_grad_norm": 0}
    )
    assert control_of(cell) == expected


def test_another_control_can_be_chosen():
    cell = from_mapping({"attention": "flex", "precision": "bf16"})
    assert control_of(cell, {"attention": "sdpa"}) == from_mapping({"attention": "sdpa"})
    with pytest.raises(ValueError, match="did you mean 'precision'"):
        control_of(cell, {"precison": "bf16"})


def test_a_control_of_another_model_is_never_silently_the_cells_own():
    """--control model=micro is either applied or refused."""
    cell = from_mapping({"model": "tiny"})
    try:
        control = control_of(cell, {"model": "micro"})
    except ValueError:
        return
    assert control.model == "micro"


def test_names_of_cells():
    cells = [from_mapping({"attention": "sdpa", "precision": "bf16", "compile": c}) for c in ("default", "off")]
    assert cell_name(cells[0], ["attention", "precision", "compile"]) == "sdpa bf16 compile=default"
    assert cell_name(cells[0], ["model", "batch_size"]) == "tiny batch_size=128"
    assert cell_name(cells[0], []) == "tiny"
    assert varying_axes(cells) == ["compile"]
    sizes = [from_mapping({"dim": d, "precision": p}) for d, p in ((64, "bf16"), (32, "fp32"))]
    assert varying_axes(sizes) == ["precision", "model"]


# --- grid files -------------------------------------------------------------------------------------------


def test_the_specifications_example():
    cells = cells_of(
        """
        base: {model: tiny}
        axes: {attention: [manual, sdpa], precision: [fp32, bf16]}
        exclude: [{attention: sdpa, precision: bf16}]
        """
    )
    assert [(c.attention, c.precision) for c in cells] == [("manual", "fp32"), ("manual", "bf16"), ("sdpa", "fp32")]
    assert {c.model for c in cells} == {"tiny"}


def test_cells_are_taken_as_they_are_and_win_over_the_base():
    cells = cells_of("base: {precision: bf16, batch_size: 8}\ncells: [{attention: sdpa}, {precision: fp32}]")
    assert [(c.attention, c.precision, c.batch_size) for c in cells] == [("sdpa", "bf16", 8), ("manual", "fp32", 8)]


def test_axes_and_cells_together():
    cells = cells_of("axes: {seed: [1, 2]}\ncells: [{seed: 7, attention: sdpa}]")
    assert [(c.seed, c.attention) for c in cells] == [(1, "manual"), (2, "manual"), (7, "sdpa")]


def test_duplicates_are_removed_and_counted():
    grid = parse_grid("axes: {dim: [128, 64, 128]}\ncells: [{model: tiny}, {attention: manual}]")
    cells, duplicates = grid.resolve({}, {})
    assert [c.dim for c in cells] == [128, 64]
    assert duplicates == 3


def test_defaults_lie_below_and_sets_above():
    text = "base: {batch_size: 32}\naxes: {attention: [manual, sdpa]}"
    cells = cells_of(text, {"batch_size": [8, 16], "precision": ["bf16"]}, batch_size=64, seed=9)
    found = [(c.attention, c.batch_size, c.precision, c.seed) for c in cells]
    assert found == [(a, b, "bf16", 9) for a in ("manual", "sdpa") for b in (8, 16)]


def test_sets_alone_are_a_grid():
    cells, _ = Grid().resolve({"model": "micro"}, {"precision": ["fp32", "bf16"]})
    assert [(c.model, c.precision) for c in cells] == [("micro", "fp32"), ("micro", "bf16")]


def test_a_preset_above_replaces_a_size_below():
    cells = cells_of("base: {dim: 64, depth: 2}\naxes: {model: [tiny, 32/1/2]}")
    assert [c.model for c in cells] == ["tiny", "32/1/2"]
    assert [c.model for c in cells_of("base: {model: tiny}\naxes: {dim: [32, 64]}")] == ["32/4/4", "64/4/4"]
    assert [c.model for c in cells_of("axes: {dim: [32]}", {"model": ["micro"]})] == ["micro"]


@pytest.mark.parametrize("value", ["1e-4", "1E-4", "0.0001", ".0001", "1.e-4", "'1e-4'"])
def test_small_numbers(value: str):
    assert [c.lr for c in cells_of(f"cells: [{{lr: {value}}}]")] == [1e-4]


def test_words_that_old_yaml_takes_for_truth_values():
    cells = cells_of("axes: {compile: [off, default], fullgraph: [on, off], max_grad_norm: [off]}")
    # without a compiler its switches are no axes: the two cells with compile off are one
    assert [(c.compile, c.fullgraph) for c in cells] == [("off", "off"), ("default", "on"), ("default", "off")]
    assert cells[0].max_grad_norm == 0
    with pytest.raises(GridError, match="compile: 'no' is not possible"):
        cells_of("axes: {compile: [no]}")
    with pytest.raises(GridError, match="compile: True is not a word"):
        cells_of("axes: {compile: [true]}")


@pytest.mark.parametrize(("value", "number"), [("010", 10), ("089", 89), ("+7", 7), ("12", 12), ("'12'", 12)])
def test_whole_numbers_are_decimal(value: str, number: int):
    assert [c.seed for c in cells_of(f"cells: [{{seed: {value}}}]")] == [number]


def test_rounds_steps_and_control():
    grid = parse_grid("cells: [{}]\nrounds: 2\nsteps: 0\ncontrol: {attention: sdpa}")
    assert (grid.rounds, grid.steps, grid.control) == (2, 0, {"attention": "sdpa"})


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200)])
def test_a_budget(text: str, seconds: float):
    assert parse_grid(f"cells: [{{}}]\nbudget: {text}").budget_s == seconds


def test_exclude_takes_a_size_however_it_is_written():
    text = "axes: {model: [tiny, micro]}\nexclude: [{model: %s}]"
    assert [c.model for c in cells_of(text % "tiny")] == ["micro"]
    assert [c.model for c in cells_of(text % "128/4/4")] == ["micro"]
    assert [c.model for c in cells_of("axes: {dim: [128, 64]}\nexclude: [{dim: '64'}]")] == ["tiny"]


GRID_MISTAKES = {
    "empty": ("", "a map with some of base, axes"),
    "a word": ("hello", "a map with some of"),
    "a list": ("[1, 2]", "a map with some of"),
    "no cells": ("base: {model: tiny}", "the grid is empty: give axes or cells"),
    "unknown key": ("axis: {seed: [1]}", "unknown key 'axis' (did you mean 'axes'?)"),
    "unknown axis": ("axes: {precison: [fp32]}", "unknown axis 'precison' (did you mean 'precision'?)"),
    "unknown axis in base": ("base: {precison: fp32}\ncells: [{}]", "did you mean 'precision'"),
    "unknown axis in exclude": ("cells: [{}]\nexclude: [{precison: fp32}]", "did you mean 'precision'"),
    "unknown value in exclude": ("cells: [{}]\nexclude: [{precision: fp23}]", "fp23"),
    "unknown axis in control": ("cells: [{}]\ncontrol: {precison: fp32}", "did you mean 'precision'"),
    "empty list": ("axes: {seed: []}", "axes: seed: the list is empty"),
    "one value": ("axes: {seed: 3}", "axes: seed: a list of values is needed, not 3"),
    "a word for a list": ("axes: {attention: sdpa}", "a list of values is needed, not 'sdpa'"),
    "axes a list": ("axes: [1]", "axes: a map of axis: value is needed"),
    "cells a map": ("cells: {attention: sdpa}", "cells: a list is needed"),
    "a cell a word": ("cells: [sdpa]", "cells: a map of axis: value is needed, not 'sdpa'"),
    "base a list": ("base: [1]\ncells: [{}]", "base: a map of axis: value is needed"),
    "a number for a word": ("axes: {attention: [3]}", "attention: 3 is not a word"),
    "nothing for a word": ("axes: {attention: [null]}", "attention: None is not a word"),
    "a word for a number": ("axes: {seed: [three]}", "seed: 'three' is not a whole number"),
    "a list for a model": ("base: {model: [tiny]}\ncells: [{}]", "model: ['tiny'] is not one of"),
    "rounds zero": ("cells: [{}]\nrounds: 0", "rounds: 0 is not a whole number of at least 1"),
    "rounds a word": ("cells: [{}]\nrounds: two", "rounds: 'two' is not a whole number"),
    "rounds a truth value": ("cells: [{}]\nrounds: true", "rounds: True is not a whole number"),
    "steps a fraction": ("cells: [{}]\nsteps: 1.5", "steps: 1.5 is not a whole number"),
    "budget a word": ("cells: [{}]\nbudget: soon", "budget: 'soon' is not a duration"),
    "budget zero": ("cells: [{}]\nbudget: 0m", "budget: '0m' is not a duration"),
    "budget a list": ("cells: [{}]\nbudget: [3]", "budget: [3] is not a duration"),
    "a key twice": ("axes: {seed: [1]}\naxes: {seed: [2]}", "the key 'axes' is given twice"),
    "an axis twice": ("axes: {seed: [1], seed: [2]}", "the key 'seed' is given twice"),
    "not yaml": ("axes: {seed: [1", "not YAML"),
    "a tab": ("axes:\n\tseed: [1]", "not YAML"),
    "two documents": ("cells: [{}]\n---\ncells: [{}]", "not YAML"),
    "a Python object": ("cells: !!python/object/apply:os.getcwd []", "not YAML"),
    "a wrong tag": ("cells: !!int many", ""),
    "a map that is none": ("cells: !!map many", ""),
    "a list as a key": ("? [1, 2]\n: 3", "not YAML"),
    "very many digits": (f"cells: [{{seed: {'9' * 5000}}}]", ""),
    "very many brackets": ("[" * 3000, ""),
}


@pytest.mark.parametrize("mistake", GRID_MISTAKES)
def test_a_wrong_grid_is_one_line_that_names_the_mistake_and_the_file(mistake: str):
    text, message = GRID_MISTAKES[mistake]
    with pytest.raises(GridError) as error:
        parse_grid(text, "my.yaml")
    assert message in str(error.value)
    assert str(error.value).startswith("my.yaml: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axes: {dim: [66]}", "dim 66 is not divisible by heads 4"),
        ("axes: {attention: [spda]}", "attention: 'spda' is not possible (did you mean 'sdpa'?)"),
        ("axes: {batch_size: [9]}\nbase: {workers: 2}", "not divisible by workers 2"),
        ("axes: {seed: [1, 2]}\nexclude: [{attention: manual}]", "every cell is excluded"),
    ],
)
def test_a_grid_that_cannot_be_resolved(text: str, message: str):
    with pytest.raises(GridError) as error:
        cells_of(text)
    assert message in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "latin.yaml").write_bytes(b"base: {model: t\xfcny}")
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "latin.yaml"):
        with pytest.raises(GridError, match="cannot be read"):
            load_grid(path)
    (tmp_path / "good.yaml").write_text("cells: [{seed: 4}]", encoding="utf-8")
    assert load_grid(tmp_path / "good.yaml").count == 1


# --- --set ------------------------------------------------------------------------------------------------


def test_sets():
    sets = parse_sets(["attention=manual,sdpa", "lr=1e-4", "model=64/2/4,tiny", "batch_size= 8 , 16,"])
    assert sets == {
        "attention": ["manual", "sdpa"], "lr": [1e-4], "model": ["64/2/4", "tiny"], "batch_size": [8, 16],
    }  # fmt: skip
    assert type(sets["batch_size"][0]) is int


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["attention"], "written as axis=value"),
        (["attention="], "written as axis=value"),
        (["attention=,"], "written as axis=value"),
        (["=sdpa"], "unknown axis ''"),
        (["atention=sdpa"], "did you mean 'attention'"),
        (["seed=1", "seed=2"], "seed is given twice"),
        (["seed=x"], "seed: 'x' is not a whole number"),
        (["model=tinny"], "model: 'tinny' is not one of"),
    ],
)
def test_wrong_sets(texts: list[str], message: str):
    with pytest.raises(GridError, match=r"^--set ") as error:
        parse_sets(texts)
    assert message in str(error.value)


# --- properties -------------------------------------------------------------------------------------------

axis_values = st.one_of(
    st.sampled_from(sorted(set(WORD_AXES) - {"compile", "residual", *COMPILE_ONLY})).flatmap(
        lambda a: st.tuples(st.just(a), st.sampled_from(WORD_AXES[a]))
    ),
    st.tuples(st.just("seed"), st.integers(0, 1000)),
    st.tuples(st.just("lr"), st.floats(1e-6, 1.0)),
    st.tuples(st.just("batch_size"), st.integers(1, 512)),
    st.tuples(st.just("model"), st.sampled_from([*PRESETS, "64/2/4", "32/1/2"])),
)
axis_maps = st.lists(axis_values, max_size=4).map(dict)
value_lists = st.lists(axis_values, min_size=1, max_size=6).map(
    lambda pairs: {key: [v for k, v in pairs if k == key] for key, _ in pairs}
)
grids = st.fixed_dictionaries({"base": axis_maps, "axes": value_lists, "cells": st.lists(axis_maps, max_size=3)})


@settings(max_examples=60, deadline=None)
@given(grids)
def test_any_valid_grid_resolves_to_different_valid_cells(content: dict[str, Any]):
    import json

    grid = parse_grid(json.dumps(content))  # JSON is YAML
    cells, duplicates = grid.resolve({}, {})
    ids = [cell.config_id for cell in cells]
    assert len(set(ids)) == len(ids)
    assert len(cells) + duplicates == grid.count
    for cell in cells:
        assert from_mapping(cell.asdict()) == cell
    product = itertools.product(*content["axes"].values())
    points = [dict(zip(content["axes"], values, strict=True)) for values in product] + content["cells"]
    for cell in cells:
        columns = cell.columns()
        assert any(
            all(columns[f"config.{key}"] == from_mapping({key: value}).columns()[f"config.{key}"]
                for key, value in point.items())
            for point in points
        )  # fmt: skip


def refusal(resolve: Callable[[], object]) -> str:
    """The words of a GridError, else none; any other error is the test's end."""
    try:
        resolve()
    except GridError as error:
        return str(error) or "no words"
    return ""


yaml_bits = st.sampled_from(
    ["base", "axes", "cells", "exclude", "control", "rounds", "steps", "attention", "model", "dim", "lr", "seed", ":",
     ": ", "- ", "[", "]", "{", "}", ", ", "\n", "\n  ", "&a ", "*a", "? ", "!!int ", "!!bool ", "!!set ", "!!map ",
     "!!binary ", "!!timestamp ", "<<: ", "|\n", ">\n", "'", '"', "#", "%", "---\n", "sdpa", "manual", "tiny", "1",
     "089", "1e-4", ".inf", ".nan", "~", "null", "true", "off", "2001-01-01", "\t", "\\", "é", "\u2028", "\x00"]
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(st.text(max_size=60), st.lists(yaml_bits, max_size=16).map("".join)))
@example("axes: {model: [[tiny]]}")
@example("cells: [{seed: 089}]")
@example("cells: !!set [seed]")
def test_any_other_text_is_a_grid_error_and_never_something_else(text: str):
    assert "\n" not in refusal(lambda: parse_grid(text).resolve({}, {}))


plain_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(AXIS_NAMES)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=3), st.sampled_from(AXIS_NAMES)), inner, max_size=3),
    ),
    max_leaves=6,
)
set_options = st.tuples(st.sampled_from(AXIS_NAMES), st.text(max_size=8)).map("=".join)
keys = st.sampled_from(["base", "axes", "cells", "exclude", "control", "rounds", "steps"])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(keys, plain_values, max_size=4))
def test_any_other_structure_is_a_grid_error_and_never_something_else(content: dict[str, Any]):
    import yaml

    text = yaml.safe_dump(content, allow_unicode=True)
    assert "\n" not in refusal(lambda: parse_grid(text).resolve({}, {}))


@settings(max_examples=200, deadline=None)
@example(texts=["\n"])  # a line break in what an error quotes is escaped
@example(texts=["axis\r\u2028=\x1b[31m"])
@given(st.lists(st.one_of(st.text(max_size=20), set_options)))
def test_any_set_option_is_taken_or_refused_with_a_grid_error(texts: list[str]):
    told = refusal(lambda: Grid().resolve({}, parse_sets(texts)))
    assert len(told.splitlines()) <= 1
    assert "\x1b" not in told
