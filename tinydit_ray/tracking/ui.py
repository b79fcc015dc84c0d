"""The MLflow UI of a local store, on 127.0.0.1 only."""

from __future__ import annotations

import os
import socket
import sys
from typing import NoReturn

from tinydit_ray.tracking.store import ENVIRONMENT, engine_uri, open_client
from tinydit_ray.tracking.uri import (
    TrackingError,
    absolute_uri,
    artifact_root,
    is_server,
    mask_text,
    sqlite_path,
)
from tinydit_ray.tracking.view import ROUNDS, SWEEPS, VIEW_PREFIX, experiment_link

HOST = "127.0.0.1"
DEFAULT_PORT = 5000


def serve(uri: str | None = None, port: int = DEFAULT_PORT) -> NoReturn:
    """Become the MLflow server of the store (made if it is not there), with its UI. Raises TrackingError."""
    full = absolute_uri(uri)
    if is_server(full):
        raise TrackingError(f"{mask_text(full)} is a server and has its own UI: open it in a browser")
    _check_port(port)
    print(f"store   {mask_text(full)}")
    for name, link in _links(full, port):
        print(f"{name}   {link}")
    print("Ctrl-C ends it", flush=True)
    command = server_command(full, port)
    calm = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONWARNINGS": "ignore"}
    os.execve(command[0], command, {**os.environ, **ENVIRONMENT, **calm})


def server_command(uri: str, port: int) -> list[str]:
    """The command of an MLflow server for an absolute store URI: one quiet process on 127.0.0.1."""
    path = sqlite_path(uri)
    places = ["--artifacts-destination", str(artifact_root(path))] if path else []
    store = engine_uri(uri)
    return [
        *(sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", store, "--registry-store-uri", store, *places),
        *("--uvicorn-opts", "--log-level warning"),
    ]


def _check_port(port: int) -> None:
    if not 0 < port < 65536:
        raise TrackingError(f"port {port}: a port is between 1 and 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise TrackingError(
                f"port {port} cannot be used ({error.strerror}): another UI may be open there;"
                " choose one with --port"
            ) from error


def _links(uri: str, port: int) -> list[tuple[str, str]]:
    """The page of each experiment that holds sweeps, last used first; else the server's first page."""
    server = f"http://{HOST}:{port}"
    found = open_client(uri).search_experiments(order_by=["last_update_time DESC"], max_results=100)
    ours = [item for item in found if f"{VIEW_PREFIX}{SWEEPS}" in item.tags]
    views = ((SWEEPS, "by sweep"), (ROUNDS, "fastest first"))
    links = [
        (f"{item.name}, {words}", experiment_link(server, item.experiment_id, view))
        for item in ours[:3]
        for view, words in views
    ]
    return links or [("UI", f"{server}/#/experiments?workflowType=machine_learning")]
