"""Sweeps read back from MLflow: the rows that their folders have, by paged searches of runs.

MLflow holds seven significant digits of a measured number; everything else comes back as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from analysis.load import Curve, Row, SweepData, in_grid_order, read_content, read_curve, typed
from tinydit_ray.record import last_attempts
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.results import RESULT_COLUMNS, rows_of_kinds
from tinydit_ray.tracking.runs import KIND_TAG, PAGE
from tinydit_ray.tracking.split import LOSS_METRIC, record_key
from tinydit_ray.tracking.store import open_client, translated
from tinydit_ray.tracking.uri import TrackingError, absolute_uri, mask_text, sqlite_path

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_RUN_ID = re.compile(r"[0-9a-f]{32}")


def connect(uri: str | None) -> tuple[MlflowClient, str]:
    """A client of an existing store, and its absolute URI. Raises UsageError; never makes a store."""
    try:
        full = absolute_uri(uri)
        path = sqlite_path(full)
        if path is not None and not path.exists():
            raise UsageError(f"{path}: there is no such MLflow store (--tracking-uri names another)")
        return open_client(full), full
    except TrackingError as error:
        raise UsageError(str(error)) from None


def from_store(target: str, uri: str | None = None) -> list[SweepData]:
    """The sweeps of an experiment, or the one whose run has this id or name. Raises UsageError."""
    client, full = connect(uri)
    try:
        with translated(full):
            parents = find_parents(client, target)
            if not parents:
                raise UsageError(
                    f"{target}: no folder, and neither a sweep's run, an experiment nor the name of a sweep"
                    f" in MLflow at {mask_text(full)}"
                )
            rounds = _rounds_by_sweep(client, parents)
            return [_sweep_of(client, run, rounds.get(_sweep_id(run), [])) for run in parents]
    except TrackingError as error:
        raise UsageError(str(error)) from None


def find_parents(client: MlflowClient, target: str) -> list[Run]:
    """Runs of sweeps: by run id, by experiment (name or id), or by the sweep's name in any experiment."""
    from mlflow.exceptions import MlflowException

    if _RUN_ID.fullmatch(target):
        try:
            run = client.get_run(target)
        except MlflowException:
            return []
        if run.data.tags.get(KIND_TAG) != "sweep":
            raise UsageError(f"{target}: this run is no sweep; give the sweep's own run, the parent")
        return [run]
    experiments = {item.name: item.experiment_id for item in client.search_experiments()}
    if target in experiments or target in experiments.values():
        found = search(client, [experiments.get(target, target)], f"tags.{KIND_TAG} = 'sweep'")
        return sorted(found, key=lambda run: run.info.start_time)
    if "'" in target:
        return []
    where = f"tags.{KIND_TAG} = 'sweep' and attributes.run_name = '{target}'"
    return list(search(client, list(experiments.values()), where))


def search(client: MlflowClient, experiments: list[str], where: str) -> Iterator[Run]:
    """All runs that fulfil the condition, page after page."""
    token = None
    while True:
        page = client.search_runs(experiments, where, max_results=PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _sweep_id(run: Run) -> str:
    return str(run.data.tags.get("sweep_id") or "")


def _rounds_by_sweep(client: MlflowClient, parents: list[Run]) -> dict[str, list[Run]]:
    """The rounds of the sweeps, by the sweep's id; one search for one sweep, one for a whole experiment."""
    experiments = list({run.info.experiment_id for run in parents})
    where = f"tags.{KIND_TAG} = 'round'"
    if len(parents) == 1:
        where += f" and tags.sweep_id = '{_sweep_id(parents[0])}'"
    found: dict[str, list[Run]] = {}
    for run in search(client, experiments, where):
        found.setdefault(_sweep_id(run), []).append(run)
    return found


def _sweep_of(client: MlflowClient, parent: Run, runs: list[Run]) -> SweepData:
    files = StoreFiles(client, {})
    content = files.content(parent) or content_of_tags(parent)
    complete = [run for run in runs if run.data.tags.get("status") and run.data.tags.get("cell_id")]
    rows = [row_of(run) for run in complete]
    files.run_ids.update({record_key(row): run.info.run_id for row, run in zip(rows, complete, strict=True)})
    rows = last_attempts(rows)
    if any(row["speedup_vs_control"] and row["status"] == "ok" and row["verdict"] is None for row in rows):
        rows = rows_of_kinds(rows)  # the sweep did not come to its end
    origin = f"MLflow run {parent.info.run_id}"
    rows = in_grid_order(rows, content)
    return SweepData(content, rows, origin, files, tags=parent.data.tags, run_status=parent.info.status)


def row_of(run: Run) -> Row:
    """One run as a row: numbers from its metrics, settings from its params, everything else from its tags."""
    values: dict[str, Any] = {**run.data.tags, **run.data.params, **run.data.metrics}
    return typed({name: values.get(name) for name in RESULT_COLUMNS})


def content_of_tags(run: Run) -> dict[str, Any]:
    """What the tags of a sweep's run tell of its ``sweep.json``, for a store whose artifacts cannot be reached."""
    tags = run.data.tags
    content: dict[str, Any] = {"name": run.info.run_name, "sweep_id": _sweep_id(run)}
    content |= {name: tags[name] for name in ("created_at", "product_version", "git_commit") if name in tags}
    for prefix, key in (("machine.", "machine"), ("versions.", "versions"), ("data_", "data")):
        content[key] = {name.removeprefix(prefix): tags[name] for name in tags if name.startswith(prefix)}
    return content


class StoreFiles:
    """Files of the rounds, downloaded when they are asked for."""

    def __init__(self, client: MlflowClient, run_ids: dict[str, str]) -> None:
        self._client = client
        self.run_ids = run_ids  # record key -> run

    def content(self, parent: Run) -> dict[str, Any] | None:
        with TemporaryDirectory(prefix="tinydit-sweep-") as folder:
            path = self._download(parent.info.run_id, "sweep.json", folder)
            return read_content(path.parent) if path else None

    def curve(self, row: Mapping[str, Any]) -> Curve | None:
        """With seconds from the artifact ``loss.csv``; where that is out of reach, steps from the metric's history."""
        run_id = self.run_ids.get(record_key(row))
        if run_id is None:
            return None
        with TemporaryDirectory(prefix="tinydit-curve-") as folder:
            path = self._download(run_id, "loss.csv", folder)
            if path:
                return read_curve(path.read_text("utf-8", errors="replace"))
        points = sorted(self._client.get_metric_history(run_id, LOSS_METRIC), key=lambda point: point.step)
        return Curve([p.step for p in points], [p.value for p in points], None) if points else None

    def samples(self, row: Mapping[str, Any]) -> bytes | None:
        run_id = self.run_ids.get(record_key(row))
        with TemporaryDirectory(prefix="tinydit-samples-") as folder:
            path = self._download(run_id, "samples.png", folder) if run_id else None
            return path.read_bytes() if path else None

    def _download(self, run_id: str, name: str, folder: str) -> Path | None:
        """The file, or None where the run has no such artifact, or its place cannot be reached from here."""
        try:
            return Path(self._client.download_artifacts(run_id, name, folder))
        except Exception:
            return None
