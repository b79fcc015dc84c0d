"""``tinydit-sweep COMMAND …``: the sweep scripts of an installed package. ``sweeps/*.py`` call the same."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tinydit_ray.sweep.errors import INTERRUPTED, USAGE, UsageError
from tinydit_ray.sweep.options import options_from, parser
from tinydit_ray.sweep.quiet import make_console


def speed_grid(arguments: list[str]) -> int:
    """Time and score a grid of setups; with no argument the five published ones."""
    from tinydit_ray.sweep.driver import run_sweep

    args = parser("speed_grid.py", speed_grid.__doc__ or "").parse_args(arguments)
    options = options_from(args, default_grid="published", command=["speed-grid", *arguments])
    return run_sweep(options, make_console())


COMMANDS: dict[str, Callable[[list[str]], int]] = {"speed-grid": speed_grid}


def run(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a command; what a user can cause is one line on stderr and exit status 2."""
    try:
        return command(arguments)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("interrupted before anything was started", file=sys.stderr)
        return INTERRUPTED


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in COMMANDS:
        print(f"usage: tinydit-sweep COMMAND [options]; commands: {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(0 if arguments in (["-h"], ["--help"]) else USAGE)
    sys.exit(run(COMMANDS[arguments[0]], arguments[1:]))
