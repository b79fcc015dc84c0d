"""A real sweep that reports to a real MLflow server: watched while it runs, then compared in a real Chromium."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from analysis_help import script_here
from sweep_help import ONE_CPU, ROOT, SMALL, TINY
from tracking_help import Server, children, parents, runs_in

from analysis.browser import Browser, chromium
from tinydit_ray.sweep.progress import Progress

pytestmark = [pytest.mark.mlflow, pytest.mark.slow]
needs_browser = [pytest.mark.browser, pytest.mark.skipif(chromium() is None, reason="no Chromium")]
GRID = "base: {model: 32/1/2, batch_size: 16}\ncells: [{}, {attention: sdpa}, {attention: sdpa, precision: bf16}]\n"
ASKED = [
    "--grid", "grid.yaml", *TINY[len(SMALL):-1], "--steps", "20", *ONE_CPU, "--rounds", "1", "--no-ray",
    "--system-metrics", "--name", "live", "--experiment", "speed",
]  # fmt: skip
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    place = Server(tmp_path_factory.mktemp("server"))
    try:
        place.start()
        yield place
    finally:
        place.stop()


@pytest.fixture(scope="module")
def live(server, tmp_path_factory):
    """The sweep's folder, what ``watch.py`` printed beside it, and what one that followed it left on its screen."""
    here, elsewhere = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("elsewhere")
    env = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    env |= {"PYTHONPATH": str(ROOT), "COLUMNS": "150"}
    (here / "grid.yaml").write_text(GRID)
    start = [sys.executable, str(ROOT / "sweeps" / "speed_grid.py"), *ASKED, "--tracking-uri", server.uri]
    driver = subprocess.Popen(start, cwd=here, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    follower, seen = None, {"folder": [], "server": []}
    try:
        deadline = time.monotonic() + PATIENCE_S
        while driver.poll() is None:
            assert time.monotonic() < deadline
            for place, target in (("folder", [str(here / "runs" / "live")]), ("server", ["live", *_uri(server)])):
                done = script_here("watch.py", *target, "--once", cwd=elsewhere)
                if done.returncode == 0:
                    seen[place].append(done.stdout)
            if follower is None and seen["server"]:
                command = [sys.executable, str(ROOT / "analysis" / "watch.py"), "live", *_uri(server), "--every", "0.5"]
                follower = subprocess.Popen(command, cwd=elsewhere, env=env, stdout=subprocess.PIPE, text=True)
            time.sleep(0.6)
        printed, _ = driver.communicate(timeout=60)
        assert driver.returncode == 0, printed
        assert follower is not None
        followed, _ = follower.communicate(timeout=60)  # it ends by itself, since the sweep has ended
        assert follower.returncode == 0
    finally:
        for process in filter(None, (driver, follower)):
            if process.poll() is None:
                process.kill()
                process.wait()
    assert f"report: {here / 'runs' / 'live' / 'report.html'}" in printed
    assert f"open {server.uri}/#/experiments/" in printed
    return here / "runs" / "live", seen, followed


def _uri(server: Server) -> list[str]:
    return ["--tracking-uri", server.uri]


@pytest.mark.parametrize("place", ["folder", "server"])
def test_a_sweep_is_watched_while_it_runs_beside_it_and_from_another_machine(live, place):
    _, seen, _ = live
    looks = seen[place]
    assert len(looks) >= 3
    running = [text for text in looks if "in work: " in text]
    assert running, looks[-1]
    assert {text.split(" rounds · ")[0].split("/")[-1] for text in looks} <= {"3", "0"}  # 0: its run was just made
    assert [text for text in looks[:-1] if "· ended" in text and "3/3" not in text] == []
    done = [int(text.split("/3 rounds")[0].split()[-1]) for text in looks if "/3 rounds" in text]
    assert done == sorted(done)
    assert any(0 < count < 3 for count in done)
    assert any("left" in text for text in running)
    assert any("best so far: " in text for text in looks)
    if place == "folder":  # what a trial does at this moment only its folder tells
        assert any(phase in text for text in running for phase in (" · build", " · timing", " · training", " · import"))


def test_a_watcher_follows_to_the_end(live):
    folder, _, followed = live
    assert "3/3 rounds · 3 ok · ended" in followed
    assert "3/3 rounds · 3 ok · ended" in script_here("watch.py", str(folder), cwd=folder).stdout


def test_the_sweep_leaves_its_report_and_summary_in_its_folder_and_in_mlflow(live, server):
    from mlflow import MlflowClient

    folder, _, _ = live
    progress = Progress.from_json((folder / "progress.json").read_text())
    assert (progress.done, progress.total, progress.ended, list(progress.working)) == (3, 3, True, [])
    written = {path.name for path in folder.iterdir()}
    assert {"report.html", "summary.md", "summary.csv", "summary.parquet", "plots"} <= written
    (parent,) = parents(runs_in(server.uri))
    stored = {item.path for item in MlflowClient(server.uri).list_artifacts(parent.info.run_id)}
    assert {"report.html", "plots", "summary.md"} <= stored
    assert 0 <= parent.data.metrics["system/cpu_utilization_percentage"] <= 100
    assert 0 < parent.data.metrics["system/system_memory_usage_percentage"] < 100
    assert "| setup |" in parent.data.tags["mlflow.note.content"]


# --- comparing in the UI --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(live, server):
    """The functions that take the documentation's pictures, the runs, and a browser."""
    spec = importlib.util.spec_from_file_location("screenshots", ROOT / "docs" / "screenshots.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SETTLE_S = 1.0
    runs = runs_in(server.uri)
    (parent,) = parents(runs)
    with Browser(patience_s=60) as browser:
        yield module, browser, parent, children(runs)


def _with_marks(test: Any) -> Any:
    for mark in needs_browser:
        test = mark(test)
    return test


DRAWN = "[...document.querySelectorAll('.js-plotly-plot')].flatMap(it => it.data || [])"


@_with_marks
def test_the_rounds_lie_beneath_their_sweep(pages, server):
    from tinydit_ray.tracking.view import SWEEPS, experiment_link

    shots, browser, parent, rounds = pages
    page = shots.opened(browser, experiment_link(server.uri, parent.info.experiment_id, SWEEPS), parent.info.run_name)
    names = [run.info.run_name for run in rounds]
    assert not page.js(f"{json.dumps(names)}.some(name => document.body.innerText.includes(name))")
    page.click("document.querySelector('.ag-row button[class*=icon-only]')")
    page.wait(f"{json.dumps(names)}.every(name => document.body.innerText.includes(name))")
    assert "sdpa bf16 · round 1" in names  # a run's name says its setup


@_with_marks
def test_the_fastest_round_is_first_and_the_three_metrics_are_the_first_columns(pages, server):
    from tinydit_ray.tracking.view import ROUNDS, experiment_link

    shots, browser, parent, rounds = pages
    page = shots.opened(browser, experiment_link(server.uri, parent.info.experiment_id, ROUNDS), "· round")
    heads = page.js(
        "[...document.querySelectorAll('.ag-header-cell[col-id]')].sort((a, b) => a.getBoundingClientRect().x -"
        " b.getBoundingClientRect().x).map(it => it.getAttribute('col-id'))"
    )
    columns = [head.split("`")[1] for head in heads if head.startswith(("metrics.", "tags.", "params."))]
    assert columns[:3] == ["ms_per_step", "velocity_mse", "probe_fd"]
    shown = page.js(
        "[...document.querySelectorAll('.ag-row [col-id=\"metrics.`ms_per_step`\"]')].sort((a, b) =>"
        " a.getBoundingClientRect().y - b.getBoundingClientRect().y).map(it => parseFloat(it.innerText))"
    )
    known = sorted(run.data.metrics["ms_per_step"] for run in rounds)
    assert shown == sorted(shown)
    assert shown == pytest.approx(known, rel=0.02)


@_with_marks
def test_losses_are_drawn_by_step_each_setup_in_its_own_colour(pages, server):
    from tinydit_ray.tracking.view import ROUNDS, experiment_link

    shots, browser, parent, rounds = pages
    url = experiment_link(server.uri, parent.info.experiment_id, ROUNDS) + "&compareRunsMode=CHART"
    page = shots.opened(browser, url, "· round")
    page.click("document.querySelector('input[placeholder=\"Search metric charts\"]')")
    page.write("train_loss")
    lines = f"{DRAWN}.filter(it => (it.mode || '').includes('lines') && it.x?.length > 1)"
    drawn = page.wait(
        f"(found => found.length >= {len(rounds)} && found)({lines}.map(it => [it.name, it.marker.color, [...it.x]]))"
    )
    assert {name for name, _, _ in drawn} == {run.info.run_name for run in rounds}
    assert all(steps == [10, 20] for _, _, steps in drawn)
    tags = {run.info.run_name: run.data.tags["mlflow.runColor"] for run in rounds}
    assert len(set(tags.values())) == len(rounds)
    assert {(name, colour[:7]) for name, colour, _ in drawn} == set(tags.items())  # a pale line lies below each


@_with_marks
def test_compare_draws_parallel_coordinates_of_the_axes_and_ms_against_velocity_mse(pages, server):
    shots, browser, parent, rounds = pages
    page = shots.compared(browser, server.uri, parent, rounds)
    page.wait(f"{DRAWN}.some(it => it.type === 'parcoords')")
    axes = page.js(f"{DRAWN}.find(it => it.type === 'parcoords').dimensions.map(it => it.label)")
    assert {"config.attention", "config.precision"} <= set(axes)
    page.click(shots.with_text("[role=tab]", "Scatter Plot"))
    for axis, name in (("x", "ms_per_step"), ("y", "velocity_mse")):
        page.click(f"document.querySelector('#{axis}-axis-selector')")
        page.click(shots.with_text("[role=option]", name))
    names = ("ms_per_step", "velocity_mse")
    expected = sorted([run.data.metrics[name] for name in names] for run in rounds)
    scatters = f"{DRAWN}.filter(it => (it.type || '').startsWith('scatter'))"
    points = f"{scatters}.flatMap(it => it.x.map((x, i) => [x, it.y[i]]))"
    page.wait(f"{points}.some(([x, y]) => Math.abs(y - {expected[0][1]}) < 1e-6 * y && x > 0)")
    found = sorted(page.js(points))
    assert [point[0] for point in found] == pytest.approx([point[0] for point in expected], rel=1e-6)
    assert [point[1] for point in found] == pytest.approx([point[1] for point in expected], rel=1e-6)


@_with_marks
def test_report_and_samples_open_as_artifacts_and_data_set_and_system_metrics_are_shown(pages, server):
    shots, browser, parent, rounds = pages

    def artifact(run: Any, name: str) -> Any:
        url = f"{server.uri}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}/artifacts/{name}"
        return shots.opened(browser, f"{url}?workflowType=machine_learning", name)

    page = artifact(parent, "report.html")
    page.wait("!!document.querySelector('iframe')")
    html = "(async it => it.srcdoc || await (await fetch(it.src)).text())(document.querySelector('iframe'))"
    assert "<h1>Sweep report</h1>" in page.js(html)
    page = artifact(rounds[0], "samples.png")
    page.wait("[...document.querySelectorAll('img')].some(it => it.complete && it.naturalWidth > 100)")
    url = f"{server.uri}/#/experiments/{parent.info.experiment_id}/runs/{parent.info.run_id}"
    page = shots.opened(browser, f"{url}?workflowType=machine_learning", "Datasets")
    page.wait(f"document.body.innerText.includes('shapes ({parent.inputs.dataset_inputs[0].dataset.digest})')")
    page = shots.opened(browser, f"{url}/system-metrics?workflowType=machine_learning", "System metrics")
    page.wait("document.body.innerText.includes('cpu_utilization_percentage')")
