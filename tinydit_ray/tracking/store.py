"""Opening a tracking store: quiet, quick to fail, and never half made."""

from __future__ import annotations

import logging
import os
import re
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from filelock import FileLock, Timeout

from tinydit_ray.tracking.uri import (
    TrackingError,
    is_server,
    mask_text,
    sqlite_path,
    sqlite_uri,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Set before MLflow is imported; what the user has set stays. A server that is gone costs seconds: one try of
# at most 10 s, and the tracker itself tries again later.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "GIT_PYTHON_REFRESH": "quiet",
}
_CHATTY = ("mlflow", "alembic", "sqlalchemy", "urllib3", "git")
_REACH_S = 5.0
_LOCK_S = 120.0


def import_mlflow(log_file: Path | None = None) -> Any:
    """MLflow, with its chatter in ``log_file`` (or nowhere) and its telemetry off."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow
        import mlflow.store.db.utils  # sets up logging of its own when first imported
    except ImportError as error:
        raise TrackingError(f"tracking needs MLflow ({error}): pip install 'tinydit-ray[mlflow]'") from error
    _quiet(log_file)
    return mlflow


class _Masked(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return mask_text(super().format(record))


def _quiet(log_file: Path | None) -> None:
    handler: logging.Handler = logging.NullHandler()
    if log_file is not None:
        handler = logging.FileHandler(log_file, delay=True, encoding="utf-8")
        handler.setFormatter(_Masked("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in _CHATTY:
        logger = logging.getLogger(name)
        for old in logger.handlers:
            if isinstance(old, logging.FileHandler):
                old.close()
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)


def open_client(uri: str, log_file: Path | None = None) -> MlflowClient:
    """A client of the store at an absolute URI, created if it is a SQLite file that is not there yet.

    Raises TrackingError, within about 10 s where a server does not answer.
    """
    path = sqlite_path(uri)
    if path is None:
        _reach(uri)
    import_mlflow(log_file)
    if path is None:
        return _connect(uri)
    with _alone(path):
        _make_sqlite(path)
        check_schema(path)
        return _connect(uri)


def _connect(uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    with translated(uri):
        client = MlflowClient(tracking_uri=engine_uri(uri))
        client.search_experiments(max_results=1)
    return client


def engine_uri(uri: str) -> str:
    """The URI as the installed SQLAlchemy reads it: from 2.1 on it takes %25 in a file's path for %."""
    if sqlite_path(uri) is None or "%" not in uri:
        return uri
    from sqlalchemy.engine import make_url

    reads_percent = make_url("sqlite:///%25").database == "%"
    return uri if reads_percent else uri.replace("%25", "%")


@contextmanager
def translated(uri: str) -> Iterator[None]:
    """Whatever goes wrong inside, in one line: a TrackingError that names the store."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        raise TrackingError(f"MLflow at {mask_text(uri)}: {one_line(error)}") from error


# What errors of MLflow, requests and SQLite say in many lines, in a few words.
_REASONS = (
    (
        r"(error code|error:|response) 40[13]|40[13] client error|unauthori[sz]ed|not authenticated",
        "it refused the user or password; put them into MLFLOW_TRACKING_USERNAME and"
        " MLFLOW_TRACKING_PASSWORD, or http://USER:PASSWORD@HOST",
    ),
    (r"database is locked", "another program holds the store locked"),
    (r"connection refused", "connection refused"),
    (r"failed to resolve|name or service not known|getaddrinfo", "no such host"),
    (r"timed out|timeout exception", "no answer in time"),
    # after the patterns above: requests wraps a refusal in the same words
    (r"connection (aborted|reset)|remote end closed|broken pipe", "the connection broke off"),
    (r"too many 5\d\d error responses", "the server fails with an error of its own, see its log"),
)


def one_line(error: BaseException, length: int = 240) -> str:
    """Why it failed, in few words where the cause is a common one, else in its first line; no passwords."""
    text = str(error).strip() or type(error).__name__
    for pattern, words in _REASONS:
        if re.search(pattern, text, re.IGNORECASE):
            return words
    line = mask_text(next(filter(None, map(str.strip, text.splitlines()))))
    return line if len(line) <= length else line[: length - 1] + "…"


# --- servers -----------------------------------------------------------------------------------------------


def _reach(uri: str) -> None:
    """A server or database that does not answer within seconds is refused before MLflow waits for it."""
    if is_server(uri):
        return _reach_http(uri)
    parts = urlsplit(uri)
    ports = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
    kind = parts.scheme.split("+")[0]
    if kind in ports and parts.hostname:
        try:
            socket.create_connection((parts.hostname, parts.port or ports[kind]), timeout=_REACH_S).close()
        except OSError as error:
            reason = one_line(error)
            raise TrackingError(f"tracking URI {mask_text(uri)} cannot be reached: {reason}") from error


def _reach_http(uri: str) -> None:
    try:
        import requests
    except ImportError as error:
        raise TrackingError(f"tracking needs MLflow ({error}): pip install 'tinydit-ray[mlflow]'") from error
    try:
        requests.get(f"{uri}/health", timeout=_REACH_S)  # any answer will do; MLflow looks closer
    except requests.exceptions.RequestException as error:
        raise TrackingError(
            f"tracking URI {mask_text(uri)} cannot be reached ({one_line(error)});"
            " start the server, or leave --tracking-uri away for a local store"
        ) from error


# --- the SQLite store ---------------------------------------------------------------------------------------


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time makes or opens a store: two at once on a new one break it for good."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_S):
            yield
    except Timeout as error:
        raise TrackingError(f"tracking store {path}: another process holds its lock {path}.lock") from error
    except OSError as error:
        raise TrackingError(f"tracking store {path}: {error.strerror or error}") from error


def _make_sqlite(path: Path) -> None:
    """Make a new store under another name, then rename it: a process killed meanwhile leaves no half one."""
    for stale in path.parent.glob(f".{path.name.replace('[', '[[]')}.*.new*"):
        stale.unlink(missing_ok=True)
    if path.exists() and path.stat().st_size:
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    with translated(sqlite_uri(path)):
        _initialize(fresh)
        with open(fresh, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(fresh, path)


def _initialize(path: Path) -> None:
    """MLflow's tables in a new file. Nothing is lost if this fails, so the disk is not waited for at each of
    some hundred statements (0.8 s instead of 6 s)."""
    import sqlalchemy
    from mlflow.store.db import utils

    engine = sqlalchemy.create_engine(engine_uri(sqlite_uri(path)))

    @sqlalchemy.event.listens_for(engine, "connect")
    def _fast(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("PRAGMA journal_mode=MEMORY")

    try:
        utils._initialize_tables(engine)
    finally:
        engine.dispose()


def check_schema(path: Path) -> None:
    """Refuse a database that is not MLflow's, or made by another version of it (MLflow would upgrade some by
    itself, without a backup)."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=20)) as store:
            tables = {name for (name,) in store.execute("SELECT name FROM sqlite_master WHERE type='table'")}
            is_versioned = "alembic_version" in tables
            versions = store.execute("SELECT version_num FROM alembic_version") if is_versioned else ()
            found = [version for (version,) in versions]
    except sqlite3.Error as error:
        raise TrackingError(f"tracking store {path}: {one_line(error)}") from error
    if not {"experiments", "runs"} <= tables:
        raise TrackingError(f"tracking store {path}: a database, but not MLflow's; choose another file")
    head, known = _revisions()
    if found == [head]:
        return
    if found and found[0] not in known:
        raise TrackingError(
            f"tracking store {path} was made by a newer MLflow than the one installed: upgrade MLflow"
            " (pip install -U mlflow), or choose another store with --tracking-uri sqlite:///PATH.db"
        )
    raise TrackingError(
        f"tracking store {path} was made by an older MLflow: copy the file as a backup, then run"
        f" `mlflow db upgrade '{sqlite_uri(path)}'`; or choose another store with --tracking-uri sqlite:///PATH.db"
    )


def _revisions() -> tuple[str | None, set[str]]:
    """The newest schema of the installed MLflow, and all it knows."""
    from alembic.script import ScriptDirectory
    from mlflow.store.db import utils

    folder = Path(utils.__file__).parent.parent / "db_migrations"
    script = ScriptDirectory(str(folder))
    return script.get_current_head(), {revision.revision for revision in script.walk_revisions()}
