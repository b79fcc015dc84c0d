"""Reading and writing the runs of one sweep through MLflow's client."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinydit_ray.tracking.split import KEY_TAG, PARENT_TAG, RunData, clean
from tinydit_ray.tracking.store import one_line, translated
from tinydit_ray.tracking.uri import TrackingError, artifact_root, mask_text, sqlite_path
from tinydit_ray.tracking.view import EXPERIMENT_TAGS, VIEW_PREFIX

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PAGE = 1000  # runs an MLflow search returns at most by default
_METRICS, _WORDS = 800, 100  # of one log_batch; MLflow takes 1,000 entries, 100 of them params or tags
KIND_TAG = "run_kind"  # "sweep" (the parent) or "round"
_DATASET_LENGTH = 36  # of a digest
_TEXT, _TEXT_BYTES = (".json", ".txt", ".log", ".md", ".yaml", ".yml", ".csv", ".html"), 5_000_000


def open_experiment(client: MlflowClient, name: str, uri: str) -> str:
    """The id of the experiment, made if it is not there. A deleted one of that name is refused."""
    from mlflow.exceptions import MlflowException

    with translated(uri):
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(client.create_experiment(name, _artifacts_of(uri, name), dict(EXPERIMENT_TAGS)))
            except MlflowException as error:  # another sweep made it at the same moment
                found = client.get_experiment_by_name(name)
                if found is None:
                    raise error
        if found.lifecycle_stage == "deleted":
            raise TrackingError(_deleted(name, found.experiment_id))
        for key, value in EXPERIMENT_TAGS.items():
            if key not in found.tags or (key.startswith(VIEW_PREFIX) and found.tags[key] != value):
                client.set_experiment_tag(found.experiment_id, key, value)
    return str(found.experiment_id)


def _deleted(name: str, experiment_id: str) -> str:
    return (
        f"experiment {name!r} was deleted in this tracking store, and its name stays taken: restore it"
        f" (`mlflow experiments restore --experiment-id {experiment_id}`, with MLFLOW_TRACKING_URI set),"
        " or choose another name with --experiment"
    )


def _artifacts_of(uri: str, name: str) -> str | None:
    """Artifacts of a local store lie beside it, in a folder per experiment; a server has its own place."""
    path = sqlite_path(uri)
    if path is None:
        return None
    folder = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)[:80]
    return (artifact_root(path) / folder).as_uri()


class Runs:
    """The runs of one sweep: a parent, and a child per record."""

    def __init__(self, client: MlflowClient, experiment_id: str, sweep_id: str) -> None:
        if "'" in sweep_id:
            raise TrackingError(f"sweep id {sweep_id!r} holds a quotation mark")
        self.client = client
        self.experiment_id = experiment_id
        self.sweep_id = sweep_id

    def search(self, condition: str) -> Iterator[Run]:
        """All runs of this sweep that fulfil the condition, page after page, deleted ones as well."""
        from mlflow.entities import ViewType

        where, token = f"tags.sweep_id = '{self.sweep_id}' and {condition}", None
        while True:
            page = self.client.search_runs(
                [self.experiment_id], where, ViewType.ALL, max_results=PAGE, page_token=token
            )
            yield from page
            token = page.token
            if not token:
                return

    def parent(self) -> Run | None:
        """The sweep's own run; one that is not deleted where there are several."""
        found = list(self.search(f"tags.{KIND_TAG} = 'sweep'"))
        return min(found, key=lambda run: (is_deleted(run), run.info.start_time), default=None)

    def rounds(self) -> dict[str, Run]:
        """Record key → run. Of two runs of one record (a reply got lost) the unfinished one is deleted."""
        return self._by_key(self.search(f"tags.{KIND_TAG} = 'round'"))

    def find(self, key: str) -> Run | None:
        return self._by_key(self.search(f"tags.{KEY_TAG} = '{key}'")).get(key)

    def _by_key(self, runs: Iterable[Run]) -> dict[str, Run]:
        found: dict[str, Run] = {}
        for run in runs:
            key = run.data.tags.get(KEY_TAG, run.info.run_id)
            if key not in found:
                found[key] = run
                continue
            spare, found[key] = sorted((found[key], run), key=lambda twin: (is_ended(twin), twin.info.run_id))
            if not is_deleted(spare):
                self.client.delete_run(spare.info.run_id)
        return found

    def write(
        self,
        data: RunData,
        files: Mapping[str, Path],
        *,
        tags: Mapping[str, str],
        run: Run | None = None,
        on_lost_files: Callable[[str], None],
    ) -> str:
        """Write one finished run. ``run`` is what an earlier, broken attempt left of it; writing the same
        values again changes nothing."""
        run_id = run.info.run_id if run else self.create(data.name, data.start_ms, tags)
        words = {**data.tags, "sweep_id": self.sweep_id}  # by which it is found again
        self.log(run_id, metrics=data.metrics, params=data.params, tags=words, at_ms=data.start_ms)
        self.log_dataset(run_id, *data.dataset)
        try:
            self.log_files(run_id, files)
        except Exception as error:
            self.client.get_run(run_id)  # raises where MLflow itself is away; else only the files are lost
            on_lost_files(one_line(error))
        self.client.set_terminated(run_id, data.status, data.end_ms)
        return run_id

    def create(self, name: str, start_ms: int, tags: Mapping[str, str]) -> str:
        words = clean({**tags, "sweep_id": self.sweep_id})
        return str(self.client.create_run(self.experiment_id, start_ms, words, name).info.run_id)

    def log(
        self,
        run_id: str,
        *,
        metrics: Iterable[tuple[str, float, int]] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        at_ms: int,
    ) -> None:
        """One call for up to 800 metric values and 100 params and tags; more calls for more."""
        from mlflow.entities import Metric, Param, RunTag

        numbers = [Metric(key, value, at_ms, step) for key, value, step in metrics]
        words: list[Any] = [Param(*item) for item in (params or {}).items()]
        words += [RunTag(*item) for item in (tags or {}).items()]
        calls = max(1, -(-len(numbers) // _METRICS), -(-len(words) // _WORDS))
        for i in range(calls):
            part = words[i * _WORDS : (i + 1) * _WORDS]
            self.client.log_batch(
                run_id,
                metrics=numbers[i * _METRICS : (i + 1) * _METRICS],
                params=[word for word in part if isinstance(word, Param)],
                tags=[word for word in part if isinstance(word, RunTag)],
                synchronous=True,
            )

    def log_series(self, run_id: str, points: Sequence[tuple[str, float, int, int]]) -> None:
        """Metric values (key, value, step, milliseconds since 1970), each at its own time."""
        from mlflow.entities import Metric

        for i in range(0, len(points), _METRICS):
            part = [Metric(key, value, at_ms, step) for key, value, step, at_ms in points[i : i + _METRICS]]
            self.client.log_batch(run_id, metrics=part, synchronous=True)

    def log_dataset(self, run_id: str, source: str, digest: str) -> None:
        """The data the run saw, as an MLflow dataset: its name and its content's digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        if not source and not digest:
            return
        data = Dataset(
            name=source or "unnamed",
            digest=digest[:_DATASET_LENGTH] or "unknown",
            source_type="tinydit_ray",
            source=json.dumps({"source": source, "digest": digest}),
        )
        context = InputTag("mlflow.data.context", "training")
        self.client.log_inputs(run_id, datasets=[DatasetInput(data, [context])])

    def log_files(self, run_id: str, files: Mapping[str, Path]) -> None:
        """Upload files under their names."""
        files = {name: path for name, path in files.items() if path.is_file()}
        if not files:
            return
        with tempfile.TemporaryDirectory(prefix="tinydit-artifacts-") as folder:
            for name, path in files.items():
                _stage(path, Path(folder, name))
            self.client.log_artifacts(run_id, folder)


def _stage(path: Path, target: Path) -> None:
    """The file under its name in the artifact folder, passwords in text masked."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in _TEXT and path.stat().st_size < _TEXT_BYTES:
        text = path.read_text("utf-8", errors="surrogateescape")
        if mask_text(text) != text:
            target.write_text(mask_text(text), "utf-8", errors="surrogateescape")
            return
    try:
        target.symlink_to(path.absolute())
    except OSError:
        shutil.copy2(path, target)


def is_ended(run: Run) -> bool:
    return run.info.status in ("FINISHED", "FAILED", "KILLED")


def is_deleted(run: Run) -> bool:
    return bool(run.info.lifecycle_stage == "deleted")


def parent_tags(parent_id: str) -> dict[str, str]:
    return {PARENT_TAG: parent_id, KIND_TAG: "round"}
