"""Tracking URIs: which store is meant, made absolute; and passwords kept out of sight. Needs no MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

DEFAULT_STORE = "mlflow.db"
MASK = "***"
_SERVER_SCHEMES = ("http", "https")
_DATABASE_SCHEMES = ("postgresql", "mysql", "mssql")
# scheme://user:password@ , with the password up to the last @ before the path
_PASSWORD = re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@]*):[^\s/\"'<>]*@")
_PASSWORD_FIELD = re.compile(r"(?P<head>[?&](?:password|passwd|pwd|(?:access_)?token)=)[^&\s'\"]+", re.I)


class TrackingError(ValueError):
    """Tracking cannot work as asked. One line for the user; the command ends with exit status 2."""


def mask_text(text: str) -> str:
    """The text with the password of every ``scheme://user:password@host`` or ``?password=`` replaced."""
    return _PASSWORD_FIELD.sub(rf"\g<head>{MASK}", _PASSWORD.sub(rf"\g<head>:{MASK}@", text))


def mask(value: Any) -> Any:
    """A copy of plain data (maps, lists, words, numbers) with every password masked."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, Mapping):
        return {mask(key): mask(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [mask(item) for item in value]
    return value


def absolute_uri(uri: str | None) -> str:
    """The store that is meant, made absolute: ``uri``, else ``$MLFLOW_TRACKING_URI``, else ./mlflow.db.

    Raises TrackingError for stores that cannot serve: folders (MLflow's old file store), databases in
    memory, and words that are no URI.
    """
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return sqlite_uri(Path(DEFAULT_STORE).absolute())
    uri = _unmasked(uri)
    scheme = uri.split(":", 1)[0].lower() if ":" in uri else ""
    if scheme == "sqlite":
        return sqlite_uri(_sqlite_file(uri))
    if scheme in _SERVER_SCHEMES:
        return _server(uri)
    if scheme.split("+")[0] in _DATABASE_SCHEMES:
        return uri
    raise TrackingError(_no_store(uri))


def _unmasked(uri: str) -> str:
    """A URI whose password was masked when it was written down needs the password from elsewhere."""
    if f":{MASK}@" not in uri:
        return uri
    if os.environ.get("MLFLOW_TRACKING_PASSWORD"):
        return re.sub(r"://[^/]*@", "://", uri)
    raise TrackingError(
        f"tracking URI {uri}: its password was masked when it was written down; give the whole URI with"
        " --tracking-uri, or user and password as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    )


def _no_store(uri: str) -> str:
    if "://" in uri and not uri.lower().startswith("file:"):
        return f"tracking URI {mask_text(uri)}: no kind of store that is known here; use sqlite:///PATH.db or http://HOST:PORT"
    return (
        f"tracking URI {mask_text(uri)}: a folder is MLflow's old file store, which is no longer kept up;"
        " use sqlite:///PATH.db or http://HOST:PORT"
    )


def _server(uri: str) -> str:
    parts = urlsplit(uri)
    try:
        good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise TrackingError(
            f"tracking URI {mask_text(uri)}: no host or no valid port in it; use http://HOST:PORT"
        )
    return uri.rstrip("/")


def _sqlite_file(uri: str) -> Path:
    name = unquote(uri.split(":", 1)[1].removeprefix("///"))
    if not name or name.startswith("//") or name == ":memory:":
        raise TrackingError(f"tracking URI {uri}: a store in memory keeps nothing; use sqlite:///PATH.db")
    if "?" in name or "\0" in name:
        raise TrackingError(f"tracking URI {uri}: the path of a store cannot hold '?'")
    return Path(os.path.abspath(os.path.expanduser(name)))


def sqlite_uri(path: Path) -> str:
    return "sqlite:///" + str(path).replace("%", "%25")


def is_server(uri: str) -> bool:
    return uri.split(":", 1)[0].lower() in _SERVER_SCHEMES


def sqlite_path(uri: str) -> Path | None:
    """The database file of an absolute SQLite URI, else None."""
    return Path(unquote(uri.removeprefix("sqlite:///"))) if uri.startswith("sqlite:///") else None


def artifact_root(path: Path) -> Path:
    """Where artifacts of a local store lie: beside the database file."""
    return path.parent / "mlartifacts"
