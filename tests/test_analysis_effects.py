"""What each switch does: against least squares on a full grid, and on grids with holes."""

from __future__ import annotations

import numpy as np
import pytest
from analysis_help import bf16_needs_compile, make_grid_sweep, product

from analysis.cells import cells_of
from analysis.effects import effects, interactions, varying
from analysis.load import load

CELLS = product(attention=["manual", "sdpa"], precision=["fp32", "bf16"], compile=["off", "default"])


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    folder = tmp_path_factory.mktemp("effects") / "full"
    make_grid_sweep(folder, CELLS)
    return cells_of(load([folder])[0].rows)


def least_squares(cells, *, pairs: bool):
    """Coefficients of a linear model of the log speed-ups, by numpy: 0/1 columns, or ±1/2 with products."""
    names = {"attention": "sdpa", "precision": "bf16", "compile": "default"}
    x = np.array([[cell["setup"][axis] == value for axis, value in names.items()] for cell in cells], float) - 0.5
    columns = [np.ones(len(cells)), *x.T]
    columns += [x[:, 0] * x[:, 1], x[:, 0] * x[:, 2], x[:, 1] * x[:, 2]] if pairs else []
    y = np.log([cell["speedup"] for cell in cells])
    return np.linalg.lstsq(np.stack(columns, 1), y, rcond=None)[0][1:]


def test_on_a_full_grid_effects_and_interactions_are_the_least_squares_fit(cells):
    assert varying(cells) == ["attention", "precision", "compile"]
    found = [np.log(effect.contrast.value) for effect in effects(cells)]
    np.testing.assert_allclose(found, least_squares(cells, pairs=False), atol=1e-9)
    pairs = {(item.axis, item.other): np.log(item.contrast.value) for item in interactions(cells)}
    keys = [("attention", "precision"), ("attention", "compile"), ("precision", "compile")]
    np.testing.assert_allclose([pairs[key] for key in keys], least_squares(cells, pairs=True)[3:], atol=1e-9)


def test_the_standard_error_is_that_of_the_weighted_sum(cells):
    """By drawing the cells' estimates many times from their own errors."""
    rng = np.random.default_rng(0)
    errors = np.array([cell["pooled"].se_log for cell in cells])
    signs = np.array([1 if cell["setup"]["precision"] == "bf16" else -1 for cell in cells]) / 4
    drawn = (rng.normal(size=(20_000, 8)) * errors) @ signs
    contrast = effects(cells)[1].contrast
    df = min(cell["pooled"].df for cell in cells)
    from scipy.stats import t

    assert np.log(contrast.high / contrast.value) == pytest.approx(t.ppf(0.975, df) * drawn.std(), rel=0.03)


def test_what_helps_only_together_is_said_first(cells):
    first = interactions(cells)[0]
    assert first.words.startswith("precision=bf16 helps only together with compile=default (")
    assert first.contrast.low < 2.0 / 1.1 < first.contrast.high
    assert "does alike" in interactions(cells)[-1].words


def test_a_grid_with_holes_compares_only_what_matches(tmp_path):
    """Named Inductor options exist only under compile, and one cell is missing: nothing leaks between axes."""
    grid = [cell for cell in CELLS if cell != {"attention": "sdpa", "precision": "fp32", "compile": "off"}]
    grid += [{"precision": "bf16", "compile": "default", "inductor": "coordinate-descent"}]
    make_grid_sweep(tmp_path / "holes", grid, speed=bf16_needs_compile)
    found = {effect.axis: effect.contrast for effect in effects(cells_of(load([tmp_path / "holes"])[0].rows))}
    assert found["inductor"].n == 1
    assert found["inductor"].low < 1.0 < found["inductor"].high
    assert found["attention"].n == 3
    assert found["attention"].value == pytest.approx(1.05, rel=0.02)


def test_without_rounds_there_is_nothing_to_say(tmp_path):
    make_grid_sweep(tmp_path / "none", CELLS, change=lambda record: {"status": "failed", "speedup_vs_control": None})
    cells = cells_of(load([tmp_path / "none"])[0].rows)
    assert (effects(cells), interactions(cells), varying(cells)) == ([], [], [])
