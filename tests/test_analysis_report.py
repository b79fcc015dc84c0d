"""``analysis/report.py``: one page that needs nothing else, and shows what a sweep holds."""

from __future__ import annotations

import re

import pytest
from analysis_help import make_grid_sweep, product, script, script_here

from analysis.browser import Browser, chromium
from analysis.plots import beside_control, front

pytest.importorskip("jinja2")
CELLS = product(precision=["fp32", "bf16"], compile=["off", "default"])
EVIL = "<script>alert('x')</script> & more"


def fails(record):
    if record["config.precision"] == "bf16" and record["config.compile"] == "off":
        empty = dict.fromkeys(
            ("ms_per_step", "speedup_vs_control", "speedup_ci_low", "speedup_ci_high", "velocity_mse")
        )
        return {**empty, "status": "failed", "reason": EVIL}
    return {}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    top = tmp_path_factory.mktemp("report")
    rows = make_grid_sweep(top / "one", CELLS, change=fails)
    done = script("report.py", "one", "--out", "page.html", cwd=top)
    assert (done.returncode, done.stderr) == (0, "")
    return rows, (top / "page.html").read_text("utf-8")


@pytest.mark.slow
def test_every_cell_is_in_the_table_and_the_fastest_is_advised(made):
    rows, text = made
    for row in rows:
        assert f'<td class="name">{row["cell_name"]}</td>' in text
    best = max(rows, key=lambda row: row["speedup_pooled"] or 0.0)
    assert f"Use {best['cell_name']}." in text
    assert f"{best['speedup_pooled_ci_low']:.2f} to {best['speedup_pooled_ci_high']:.2f}" in text


@pytest.mark.slow
def test_the_lower_roof_is_named(made):
    _, text = made
    words = "the step, unfused, needs 75 ms of memory traffic and 50 ms of matmuls: memory is its lower roof"
    assert f"In fp32: {words}" in text
    assert "In bf16: the step, unfused, needs 50 ms of memory traffic and 33 ms of matmuls" in text


@pytest.mark.slow
def test_a_reason_is_shown_as_text(made):
    _, text = made
    assert "alert(&#39;x&#39;)" in text
    assert "<script>alert" not in text
    assert text.count("<script") == 1


@pytest.mark.slow
def test_nothing_is_fetched(made):
    _, text = made
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert links
    assert [link[:60] for link in links if not link.startswith(("data:image/png;", "#"))] == []
    assert not re.findall(r"@import|url\((?!#)", text)
    text = re.sub(r"<dd>[^<]*</dd>", "", text)  # the command may name a server
    assert not re.findall(r"https?://(?!www\.w3\.org/)", text)  # names of XML are no resources


@pytest.mark.slow
def test_sweeps_and_node_kinds_have_tables_of_their_own(tmp_path):
    def kind(record):
        return {"node_kind": "other" if record["config.compile"] == "off" else "cpu"}

    make_grid_sweep(tmp_path / "runs" / "mixed", CELLS, change=kind, rounds=1)
    make_grid_sweep(tmp_path / "runs" / "plain", CELLS, rounds=1, content={"sweep_id": "another"})
    assert script_here("report.py", "runs", "--no-plots", cwd=tmp_path).returncode == 0
    assert (tmp_path / "report.html").read_text("utf-8").count('<table class="sortable">') == 3


@pytest.mark.parametrize("target", ["nowhere", "."])
def test_what_is_no_sweep_is_one_line_and_exit_2(tmp_path, target):
    done = script_here("report.py", target, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_front_holds_what_nothing_beats():
    cells = [{"ms": ms, "mse": mse} for ms, mse in ((3, 1.0), (1, 3.0), (2, 2.0), (2, 4.0), (4, 1.0), (None, 0.1))]
    assert [cell["ms"] for cell in front(cells)] == [1, 2, 3]
    close = [{"ms": 100.0, "mse": 0.39281}, {"ms": 101.0, "mse": 0.5}, {"ms": 130.0, "mse": 0.39279}]
    assert [cell["ms"] for cell in front(close)] == [100.0]  # a score in the fifth digit is no trade-off


def test_sampling_is_drawn_beside_the_control_of_the_same_windows():
    """Medians of different windows: the slower-looking sampler is the one that beat its own control."""
    cells = [
        {"name": "eager", "number": 1, "sampling": 20.0, "sampling_control": 20.0},
        {"name": "compiled", "number": 2, "sampling": 25.0, "sampling_control": 32.0},
        {"name": "int8", "number": 3, "sampling": None, "sampling_control": None},
    ]
    figure = beside_control(cells, value="sampling", control="sampling_control", words="ms")
    widths = sorted(bar.get_width() for bar in figure.axes[0].patches)
    assert widths == [20.0, 20.0, 25.0, 32.0]
    assert beside_control(cells[2:], value="sampling", control="sampling_control", words="ms") is None


@pytest.mark.slow
def test_the_figures_are_files_as_well(made, tmp_path_factory):
    from PIL import Image

    _, text = made
    folder = next(path for path in tmp_path_factory.getbasetemp().glob("report*") if (path / "page.html").exists())
    names = {path.name for path in (folder / "plots").iterdir()}
    wanted = ("speedup", "effects", "peak", "roofline", "pareto", "loss-steps", "compile", "memory")
    assert {f"{name}.{kind}" for name in wanted for kind in ("png", "svg")} <= names
    assert Image.open(folder / "plots" / "speedup.png").size[0] > 500
    assert text.count("<svg") == sum(name.endswith(".svg") for name in names)
    assert "Sampling is left out: this sweep did not time sampling." in text


@pytest.mark.slow
def test_the_axes_of_the_roofline_have_numbers_as_people_write_them():
    from analysis.plots import roofline

    known = {"peak": 0.1, "gbytes": 1.0, "bandwidth": 20.0, "setup": {"precision": "fp32"}}
    figure = roofline([{**known, "tflops": 0.03, "gflops": 40.0, "number": 1, "name": "one"},
                       {**known, "tflops": 0.05, "gflops": 2.0, "number": 2, "name": "two"}])  # fmt: skip
    figure.draw_without_rendering()
    (axes,) = figure.axes
    for axis in (axes.xaxis, axes.yaxis):
        shown = [label.get_text() for label in axis.get_ticklabels(which="both") if label.get_text()]
        assert len(shown) >= 3
        assert [float(word) for word in shown] == pytest.approx(list(axis.get_majorticklocs()), rel=1e-3)


def test_time_to_quality_is_when_all_have_reached_the_same_loss():
    from analysis.figures import time_to_quality
    from analysis.load import Curve

    def cell(compiled, flags=""):
        return {"compile": 5.0, "setup": {"compile": "default" if compiled else "off"}, "rows": [{"flags": flags}]}

    slow = (cell(False), Curve([1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0], [10.0, 20.0, 30.0, 40.0]))
    fast = (cell(True), Curve([1, 2, 3, 4], [4.0, 2.0, 1.0, 0.0], [1.0, 2.0, 3.0, 4.0]))
    target, found = time_to_quality([slow, fast])
    assert target == 2.0  # the mean of the last three of the slower one
    assert [(cell["train_s"], cell["compile"]) for cell in found] == [(40.0, 0.0), (4.0, 5.0)]
    assert time_to_quality([slow])[1] == []


def test_the_compile_of_a_quality_grid_is_within_its_seconds():
    from analysis.figures import time_to_quality
    from analysis.load import Curve

    curve = Curve([1, 2, 3], [1.0, 1.0, 1.0], [31.0, 32.0, 33.0])
    for compiled, seconds in (("default", (3.0, 30.0)), ("off", (33.0, 0.0))):
        row = {"flags": "few-steps,training-pace"}
        cell = {"compile": 30.0, "setup": {"compile": compiled}, "rows": [row]}
        _, found = time_to_quality([(cell, curve)] * 2)
        assert (found[0]["train_s"], found[0]["compile"]) == seconds


@pytest.mark.browser
@pytest.mark.skipif(chromium() is None, reason="no Chromium")
def test_the_page_in_a_browser_sorts_and_filters_without_an_error(made, tmp_path):
    """Wide and light, and as a phone in the dark: nothing wider than the screen, text told from its ground."""
    rows, text = made
    page_file = tmp_path / "page.html"
    page_file.write_text(text, "utf-8")
    names = "[...document.querySelectorAll('table.sortable tbody tr:not([hidden]) td.name')].map(c => c.innerText)"
    with Browser() as browser:
        page = browser.page(page_file.as_uri())
        page.click("[...document.querySelectorAll('th button')].find(b => b.innerText === 'speed-up')")
        speeds = {row["cell_name"]: row["speedup_pooled"] for row in rows}
        shown = page.js(names)
        known = [speeds[name] for name in shown if speeds[name]]
        assert known == sorted(known)
        assert speeds[shown[-1]] is None  # what has no number stays behind
        page.click("document.querySelector('input[type=search]')")
        page.write("COMPILE=DEFAULT")
        page.wait(f"{names}.length === 2")
        page.js("(() => { const it = document.querySelector('select[data-axis=precision]');"
                " it.value = 'bf16'; it.dispatchEvent(new Event('input')); })()")  # fmt: skip
        assert page.js(names) == ["bf16 compile=default"]  # the text and the axis together
        assert page.js("document.querySelector('.shown').innerText") == "1 of 4 setups"
        axes = page.js("[...document.querySelectorAll('select')].map(it => it.dataset.axis)")
        assert axes == ["precision", "compile"]
        phone = browser.page(page_file.as_uri(), width=390, height=844, dark=True)
        assert phone.js("document.documentElement.scrollWidth") <= 390
        ink, ground = phone.js("['color', 'backgroundColor'].map(key => getComputedStyle(document.body)[key])")
        assert sum(map(int, re.findall(r"\d+", ink)[:3])) > 600 > 150 > sum(map(int, re.findall(r"\d+", ground)[:3]))
        assert (page.errors, phone.errors) == ([], [])
