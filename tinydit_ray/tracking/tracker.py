"""Sending a sweep to MLflow while it runs. MLflow may go away meanwhile: the sweep goes on without it."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from tinydit_ray.record import Record, read_records
from tinydit_ray.tracking import parent
from tinydit_ray.tracking.care import hold, is_there, user_name
from tinydit_ray.tracking.files import files_of
from tinydit_ray.tracking.runs import KIND_TAG, Runs, is_deleted, is_ended, open_experiment, parent_tags
from tinydit_ray.tracking.split import record_key, run_of, time_ms
from tinydit_ray.tracking.store import one_line, open_client, translated
from tinydit_ray.tracking.uri import TrackingError, absolute_uri, mask_text
from tinydit_ray.tracking.view import colour_tags

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.entities import Run

    from tinydit_ray.bench.system import Sample

LOG_NAME = "mlflow.log"
STATUSES = ("FINISHED", "FAILED", "KILLED")
_PROGRESS_LENGTH = 5000
_AT_ONCE = 20  # records from earlier that are sent again when MLflow is back

_logger = logging.getLogger("tinydit_ray.tracking")


class Tracker:
    """The MLflow runs of one sweep: ``open`` before the first trial, ``log_record`` after each, ``finish``.

    ``uri`` (password masked), ``run_id`` and ``experiment_id`` are for printing and ``sweep.json``;
    ``warnings`` holds what went wrong, each kind once, and ``on_warning`` is called with it.
    """

    retry_s = 30.0  # pause after MLflow did not answer; doubled each time
    longest_retry_s = 300.0

    def __init__(
        self, runs: Runs, *, uri: str, sweep: Mapping[str, Any], sweep_dir: Path, lock: FileLock
    ) -> None:
        self.uri = mask_text(uri)
        self.experiment_id = runs.experiment_id
        self.run_id = ""
        self.warnings: list[str] = []
        self.on_warning: Callable[[str], None] = _logger.warning
        self._runs = runs
        self._sweep = sweep
        self._sweep_dir = sweep_dir
        self._lock = lock
        self._rounds: dict[str, Run] = {}  # record key -> run that was there before this process
        self._sent: dict[str, str] = {}  # record key -> run id of a complete run
        self._unsent: dict[str, tuple[Record, Mapping[str, Path]]] = {}
        self._tried: set[str] = set()  # of the unsent: something of them may have arrived
        self._refused: set[str] = set()  # of the unsent: MLflow answers, but does not take them
        self._warned: set[str] = set()
        self._retry_at = 0.0
        self._pause_s = self.retry_s

    @classmethod
    def open(cls, *, uri: str | None, experiment: str, sweep: Mapping[str, Any], sweep_dir: Path) -> Tracker:
        """Open (or make) the store and the sweep's own run; a sweep that is resumed goes on in its run.

        ``uri`` None means ``$MLFLOW_TRACKING_URI``, else ``sqlite:///mlflow.db`` in the working directory.
        Raises TrackingError in one line where tracking cannot work.
        """
        tracker = cls.attach(uri=uri, experiment=experiment, sweep=sweep, sweep_dir=sweep_dir)
        try:
            with translated(tracker.uri):
                tracker._runs.client.update_run(tracker.run_id, status="RUNNING")
        except TrackingError:
            tracker.close()
            raise
        return tracker

    @classmethod
    def attach(
        cls, *, uri: str | None, experiment: str, sweep: Mapping[str, Any], sweep_dir: Path
    ) -> Tracker:
        """As ``open``, but the state of the sweep's own run stays as it is."""
        full = absolute_uri(uri)
        lock = hold(sweep_dir)
        try:
            client = open_client(full, sweep_dir / LOG_NAME)
            experiment_id = open_experiment(client, experiment, full)
            runs = Runs(client, experiment_id, str(sweep["sweep_id"]))
            tracker = cls(runs, uri=full, sweep=sweep, sweep_dir=sweep_dir, lock=lock)
            with translated(full):
                tracker._open_parent()
        except BaseException:
            lock.release()
            raise
        return tracker

    def _open_parent(self) -> None:
        found = self._runs.parent()
        if found is not None and is_deleted(found):
            raise TrackingError(
                f"the run of this sweep ({found.info.run_id}) was deleted in MLflow at {self.uri}:"
                " restore it there, or choose another --experiment"
            )
        tags = {KIND_TAG: "sweep", "mlflow.user": user_name(), **parent.source_tags(self._sweep)}
        start = time_ms(self._sweep.get("created_at")) or int(time.time() * 1000)
        self.run_id = found.info.run_id if found else self._runs.create(str(self._sweep["name"]), start, tags)
        params = parent.sweep_params(self._sweep)
        known = found.data.params if found else {}
        changed = {f"changed.{key}": value for key, value in params.items() if known.get(key, value) != value}
        fresh = {key: value for key, value in params.items() if key not in known}
        tags = {**parent.sweep_tags(self._sweep), **changed}
        self._runs.log(self.run_id, params=fresh, tags=tags, at_ms=start)
        data = self._sweep.get("data") or {}
        self._runs.log_dataset(self.run_id, str(data.get("source") or ""), str(data.get("digest") or ""))
        self._runs.log_files(self.run_id, {"sweep.json": self._sweep_dir / "sweep.json"})
        self._rounds = self._runs.rounds() if found else {}
        done = {key: run for key, run in self._rounds.items() if is_ended(run) or is_deleted(run)}
        self._sent = {key: run.info.run_id for key, run in done.items()}

    def log_record(self, record: Record, files: Mapping[str, Path]) -> None:
        """Send one record as a run of its own. Never raises: what cannot be sent waits, said once in
        ``warnings``. A record that is there already is left alone."""
        key = record_key(record)
        if key in self._sent:
            return
        if time.monotonic() < self._retry_at:
            self._unsent[key] = (record, dict(files))
        elif self._try(record, files):
            waiting = [item for late, item in self._unsent.items() if late not in self._refused]
            for item in waiting[:_AT_ONCE]:
                if not self._try(*item):
                    break

    def tell(self, progress: str) -> None:
        """Where the sweep stands, as a tag of its run. It is no loss where MLflow is away: the next one comes soon."""
        if self._is_away():
            return
        try:
            self._runs.client.set_tag(self.run_id, "progress", progress[:_PROGRESS_LENGTH])
        except Exception as error:
            _logger.debug("MLflow", exc_info=error)
            self._note(error)

    def log_samples(self, samples: Sequence[Sample]) -> None:
        """System metrics on the sweep's own run. Those that MLflow does not take are lost: they are no result."""
        if self._is_away() or not samples:
            return
        try:
            self._runs.log_series(
                self.run_id, [(key, value, s.step, s.at_ms) for s in samples for key, value in s.values.items()]
            )
        except Exception as error:
            self._note(error)

    def _try(self, record: Record, files: Mapping[str, Path]) -> bool:
        """Send a record. False: MLflow is away, and nothing more should be sent for a while."""
        key = record_key(record)
        try:
            self._send(record, files)
        except Exception as error:
            self._unsent[key] = (record, dict(files))
            self._tried.add(key)
            self._refused.add(key)
            return self._note(error)
        self._unsent.pop(key, None)
        self._refused.discard(key)
        self._retry_at, self._pause_s = 0.0, self.retry_s
        return True

    def _send(self, record: Record, files: Mapping[str, Path]) -> None:
        data = run_of(record, files)
        run = self._runs.find(data.key) if data.key in self._tried else self._rounds.get(data.key)
        if run is not None and (is_ended(run) or is_deleted(run)):
            self._sent[data.key] = run.info.run_id
            return
        tags = {**parent_tags(self.run_id), "record_key": data.key, "mlflow.user": user_name()}
        tags |= parent.source_tags(self._sweep) | colour_tags(self._sweep, record)
        lost = f"MLflow at {self.uri} took no files of {data.name!r}; they stay in {self._sweep_dir}"
        self._sent[data.key] = self._runs.write(
            data, files, tags=tags, run=run, on_lost_files=lambda why: self._warn("files", f"{lost} ({why})")
        )

    def _note(self, error: Exception) -> bool:
        """Say once that records wait. True where MLflow is there, and does not take just this record."""
        _logger.debug("MLflow", exc_info=error)
        answers = is_there(self._runs.client, self.experiment_id, error)
        if not answers:
            self._refused.clear()
            self._retry_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, self.longest_retry_s)
        what = "did not take a record" if answers else "does not answer"
        command = f"python -m tinydit_ray.tracking sync {shlex.quote(str(self._sweep_dir))}"
        self._warn(
            what,
            f"MLflow at {self.uri} {what} ({one_line(error)}); the records stay in the sweep folder,"
            f" and what is still missing at the end is sent by: {command}",
        )
        return answers

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self.warnings.append(message)
            self.on_warning(message)

    def finish(
        self,
        *,
        status: str,
        summary: Mapping[str, Path],
        pooled: pd.DataFrame | None,
        end_ms: int | None = None,
    ) -> None:
        """Send what waits, add the results, and end the sweep's own run as FINISHED, FAILED or KILLED."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r} is none of {', '.join(STATUSES)}")
        try:
            self.send_missing(read_records(self._sweep_dir / "records.jsonl"))
            if not self._is_away():
                self._add_results(summary, parent.pooled_of(pooled))
                self._runs.client.set_terminated(self.run_id, status, end_ms)
        except Exception as error:
            self._note(error)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the sweep; its own run stays as it is."""
        self._lock.release()

    def send_missing(self, records: list[Record]) -> int:
        """Send every record that is not there yet, until MLflow is found away; how many were sent."""
        before, self._retry_at = len(self._sent), 0.0
        for record in records:
            if (key := record_key(record)) not in self._sent:
                self._unsent.setdefault(key, (record, files_of(self._sweep_dir, record)))
        for waiting in list(self._unsent.values()):
            if not self._try(*waiting):
                break
        return len(self._sent) - before

    @property
    def unsent(self) -> int:
        """How many records wait for MLflow."""
        return len(self._unsent)

    def run(self) -> Run:
        """The sweep's own run as MLflow holds it now."""
        return self._runs.client.get_run(self.run_id)

    def _is_away(self) -> bool:
        return time.monotonic() < self._retry_at

    def _add_results(self, summary: Mapping[str, Path], pooled: parent.Pooled) -> None:
        """Pooled numbers on the rounds, the outcome on the sweep's run; only what is new is written."""
        now = int(time.time() * 1000)
        rounds = self._runs.rounds()
        for key, run in rounds.items():
            numbers, words = pooled.get(key.split("/")[0], ({}, {}))
            if not is_deleted(run):
                self._update(run, numbers, words, now)
            if not is_ended(run) and not is_deleted(run) and key not in self._sent:
                self._runs.client.set_terminated(run.info.run_id, "KILLED", now)
        names = {key.split("/")[0]: run.data.tags.get("cell_name", "") for key, run in rounds.items()}
        numbers, words = parent.outcome(pooled, names)
        ended = parent.counts({key: run.data.tags.get("status", "") for key, run in rounds.items()})
        numbers |= {f"rounds_{status}": float(number) for status, number in ended.items()}
        words["status"] = ", ".join(f"{number} {status}" for status, number in ended.items())
        if text := parent.note(summary):
            words["mlflow.note.content"] = text
        self._update(self.run(), numbers, words, now)
        self._runs.log_files(self.run_id, summary)

    def _update(self, run: Run, numbers: Mapping[str, float], words: Mapping[str, str], now: int) -> None:
        metrics = [(key, value, 0) for key, value in numbers.items() if run.data.metrics.get(key) != value]
        tags = {key: value for key, value in words.items() if run.data.tags.get(key) != value}
        if metrics or tags:
            self._runs.log(run.info.run_id, metrics=metrics, tags=tags, at_ms=now)
