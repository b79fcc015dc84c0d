"""``tinydit-sweep COMMAND …``: the sweep scripts of an installed package. ``sweeps/*.py`` call the same."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tinydit_ray.sweep.errors import INTERRUPTED, USAGE, UsageError
from tinydit_ray.sweep.options import count, options_from, parser
from tinydit_ray.sweep.quiet import make_console


def speed_grid(arguments: list[str]) -> int:
    """Time and score a grid of setups; with no argument the five published ones."""
    from tinydit_ray.sweep.driver import run_sweep

    args = parser("speed_grid.py", speed_grid.__doc__ or "").parse_args(arguments)
    options = options_from(args, default_grid="published", command=["speed-grid", *arguments])
    return run_sweep(options, make_console())


def null_check(arguments: list[str]) -> int:
    """Time one cell against itself several times: the noise floor of this machine, and what it can show."""
    from tinydit_ray.sweep.driver import run_sweep
    from tinydit_ray.sweep.null import finish_null

    p = parser("null_check.py", null_check.__doc__ or "")
    p.add_argument("--comparisons", type=count(2), default=8, help="how many times over (default: 8)")
    args = p.parse_args(arguments)
    if args.steps is None:
        args.steps = 0  # nothing is trained: the timing is in question
    options = options_from(args, default_grid="null", command=["null-check", *arguments])
    options.repeats = args.comparisons
    options.time_s = args.time_s or 30.0
    options.self_control = True
    return run_sweep(options, make_console(), finish_null)


def overhead(arguments: list[str]) -> int:
    """Seconds that Ray's documented pattern, our path and --no-ray cost a trial, measured in one run."""
    from tinydit_ray.sweep.overhead import run_overhead

    p = parser("overhead.py", overhead.__doc__ or "")
    p.add_argument("--trials", type=count(1), default=3, help="trials of each path after a first one (default: 3)")
    args = p.parse_args(arguments)
    args.quick, args.rounds, args.time_s, args.steps = True, 1, args.time_s or 3.0, args.steps or 0
    options = options_from(args, default_grid="null", command=["overhead", *arguments])
    return run_overhead(options, make_console(), args.trials)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "speed-grid": speed_grid,
    "null-check": null_check,
    "overhead": overhead,
}


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
