"""Pictures of the MLflow UI for these pages: a real server on a real store, in a real Chromium.

    python docs/screenshots.py sqlite:///mlflow.db --experiment tinydit --out docs

Of the experiment's last sweep: its rounds beneath it, all rounds fastest first, the loss curves, the comparison
(parallel coordinates over the axes that vary; ms per step against velocity MSE), samples and report as artifacts, and
the run with its data set.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analysis.browser import Browser, Page
from analysis.store import connect, find_parents, search
from tinydit_ray.tracking.store import ENVIRONMENT
from tinydit_ray.tracking.ui import server_command
from tinydit_ray.tracking.view import ROUNDS, SWEEPS, experiment_link

SETTLE_S = 3.0  # charts are drawn after their numbers came


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri", help="MLflow store, such as sqlite:///mlflow.db")
    parser.add_argument("--experiment", default="tinydit", help="its name, or a sweep's (default: tinydit)")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES), help="these pictures alone")
    options = parser.parse_args()
    client, uri = connect(options.uri)
    parent = find_parents(client, options.experiment)[-1]
    where = f"tags.run_kind = 'round' and tags.sweep_id = '{parent.data.tags['sweep_id']}'"
    rounds = list(search(client, [parent.info.experiment_id], where))
    with server(uri) as address, Browser() as browser:
        for name in options.only:
            errors = PICTURES[name](browser, address, parent, rounds, options.out / f"mlflow-{name}.png")
            print(options.out / f"mlflow-{name}.png", *errors, sep="\n  ")


@contextmanager
def server(uri: str) -> Iterator[str]:
    """An MLflow server of the store on a free port of 127.0.0.1; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    calm = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        server_command(uri, port), env={**os.environ, **ENVIRONMENT, **calm},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def wait_for(port: int, process: subprocess.Popen[bytes], limit_s: float = 120.0) -> None:
    start = time.monotonic()
    while time.monotonic() - start < limit_s and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise SystemExit(f"the MLflow server did not start on port {port}")


def opened(browser: Browser, url: str, words: str, *, height: int = 900) -> Page:
    """The page, when it shows the words, without what lies over it."""
    page = browser.page(url, width=1500, height=height)
    page.wait(f"document.body.innerText.includes({json.dumps(words)})")
    time.sleep(SETTLE_S)
    for label in ("Close", "Hide banner"):  # MLflow's assistant opens by itself; the note on shared views
        if page.js(f"!!document.querySelector('[aria-label={json.dumps(label)}]')"):
            page.click(f"document.querySelector('[aria-label={json.dumps(label)}]')")
    return page


def with_text(selector: str, text: str) -> str:
    """Expression: the first element of the selector whose text is this."""
    found = f"[...document.querySelectorAll({json.dumps(selector)})]"
    return f"{found}.find(e => e.innerText.trim() === {json.dumps(text)})"


def taken(page: Page, path: Path) -> list[str]:
    time.sleep(SETTLE_S)
    page.picture(path)
    return [error for error in page.errors if "users/current" not in error]  # a server without users has none


def by_sweep(browser: Browser, address: str, parent: Any, rounds: list[Any], path: Path) -> list[str]:
    page = opened(browser, experiment_link(address, parent.info.experiment_id, SWEEPS), parent.info.run_name)
    page.click("document.querySelector('.ag-row button[class*=icon-only]')")  # the small + before the sweep's name
    return taken(page, path)


def fastest_first(browser: Browser, address: str, parent: Any, rounds: list[Any], path: Path) -> list[str]:
    page = opened(browser, experiment_link(address, parent.info.experiment_id, ROUNDS), "· round")
    return taken(page, path)


def loss(browser: Browser, address: str, parent: Any, rounds: list[Any], path: Path) -> list[str]:
    url = experiment_link(address, parent.info.experiment_id, ROUNDS) + "&compareRunsMode=CHART"
    page = opened(browser, url, "· round")
    page.click("document.querySelector('input[placeholder=\"Search metric charts\"]')")
    page.write("train_loss")
    page.click("document.querySelector('h1, h2')")  # the mouse leaves the charts: their tools go
    return taken(page, path)


def compared(browser: Browser, address: str, parent: Any, rounds: list[Any]) -> Page:
    """MLflow's comparison of the first rounds: those that trained, and so have a quality."""
    first = [run.info.run_id for run in rounds if "velocity_mse" in run.data.metrics]
    chosen = f"runs={quote(json.dumps(first))}&experiments={quote(json.dumps([parent.info.experiment_id]))}"
    return opened(browser, f"{address}/#/compare-runs?{chosen}&workflowType=machine_learning", "Parallel Coordinates")


def parallel(browser: Browser, address: str, parent: Any, rounds: list[Any], path: Path) -> list[str]:
    return taken(compared(browser, address, parent, rounds), path)


def scatter(browser: Browser, address: str, parent: Any, rounds: list[Any], path: Path) -> list[str]:
    page = compared(browser, address, parent, rounds)
    page.click(with_text("[role=tab]", "Scatter Plot"))
    for axis, name in (("x", "ms_per_step"), ("y", "velocity_mse")):
        page.click(f"document.querySelector('#{axis}-axis-selector')")
        page.click(with_text("[role=option]", name))
    return taken(page, path)


def artifact(name: str) -> Any:
    def picture(browser: Browser, address: str, parent: Any, rounds: list[Any], path: Path) -> list[str]:
        run = parent if name == "report.html" else next(run for run in rounds if "velocity_mse" in run.data.metrics)
        url = f"{address}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}/artifacts/{name}"
        return taken(opened(browser, f"{url}?workflowType=machine_learning", name), path)

    return picture


def overview(browser: Browser, address: str, parent: Any, rounds: list[Any], path: Path) -> list[str]:
    url = f"{address}/#/experiments/{parent.info.experiment_id}/runs/{parent.info.run_id}?workflowType=machine_learning"
    return taken(opened(browser, url, "Dataset"), path)


def system(browser: Browser, address: str, parent: Any, rounds: list[Any], path: Path) -> list[str]:
    url = f"{address}/#/experiments/{parent.info.experiment_id}/runs/{parent.info.run_id}/system-metrics"
    return taken(opened(browser, f"{url}?workflowType=machine_learning", "System metrics"), path)


PICTURES = {
    "sweep": by_sweep, "rounds": fastest_first, "loss": loss, "parallel": parallel, "scatter": scatter,
    "samples": artifact("samples.png"), "report": artifact("report.html"), "overview": overview,
    "system": system,
}  # fmt: skip


if __name__ == "__main__":
    main()
