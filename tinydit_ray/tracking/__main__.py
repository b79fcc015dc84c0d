"""``python -m tinydit_ray.tracking sync SWEEP`` and ``... ui``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tinydit_ray.tracking.sync import sync
from tinydit_ray.tracking.ui import DEFAULT_PORT, serve
from tinydit_ray.tracking.uri import TrackingError


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 it cannot work as asked, 3 some records could not be sent."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "ui":
            serve(options.tracking_uri, options.port)
        return _sync(options.sweep, options.tracking_uri)
    except TrackingError as error:
        print(f"tracking: {error}", file=sys.stderr)
        return 2


def _sync(sweep: Path, uri: str | None) -> int:
    done = sync(sweep, uri)
    for warning in done.warnings:
        print(warning, file=sys.stderr)
    found = f"{done.sent} of {done.records} records sent, {done.missing} missing"
    print(f"{done.uri}: {found}; the sweep is {done.status}")
    return 3 if done.missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tinydit_ray.tracking", description="Sweeps in MLflow.")
    commands = parser.add_subparsers(dest="command", required=True)
    send = commands.add_parser("sync", help="send the records of a sweep folder that MLflow does not have")
    send.add_argument("sweep", type=Path, help="sweep folder, such as runs/speed-grid")
    show = commands.add_parser("ui", help="open the MLflow UI of a local store on 127.0.0.1")
    show.add_argument("--port", type=int, default=DEFAULT_PORT, help="default %(default)s")
    for command in (send, show):
        command.add_argument(
            "--tracking-uri",
            metavar="URI",
            help="sqlite:///PATH.db or http://HOST:PORT; by default the one of the sweep, or mlflow.db here",
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
