"""Starting a Ray, or joining one, with what its trials inherit."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from tinydit_ray.distributed.resources import DRIVER_RESOURCE
from tinydit_ray.sweep.errors import UsageError

ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # workers run at nice 15 otherwise, and a timing would be of that
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_process_group_cleanup_enabled": "1",  # a trial that dies takes along what it started: compilers, loaders
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the record is the result; nothing reads Tune's own files
    "TUNE_MAX_PENDING_TRIALS_PG": "1000",  # the sweep itself decides how many trials there are at a time
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is the driver's to handle: it keeps what is done and ends
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",  # of worker groups; each check wakes every worker once
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "150",  # loaded machines import torch slowly
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def start(address: str | None, cpus: int | None) -> None:
    import ray

    how: dict[str, Any] = (
        {"address": address}
        if address
        # "local": without it Ray looks for one that somebody else runs on this machine
        else {
            "address": "local",
            "num_cpus": cpus,
            "include_dashboard": False,
            "resources": {DRIVER_RESOURCE: 1000},
        }
    )
    try:
        ray.init(
            **how,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
            runtime_env={"env_vars": _trial_environment()},
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"--address {address}" if address else "Ray"
        raise UsageError(f"{where}: cannot be reached or started ({str(error).splitlines()[0]})") from None


def _trial_environment() -> dict[str, str]:
    """What trials inherit: where the data and its cache lie; Ray sets the threads unless they are set."""
    names = ("TINYDIT_DATA", "TINYDIT_CACHE", "CXX", "PYTHONPATH")
    return {name: os.environ[name] for name in names if name in os.environ} | ENVIRONMENT


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
