"""``tinydit-sweep COMMAND …``: the sweep scripts of an installed package. ``sweeps/*.py`` call the same."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from tinydit_ray.arguments import count, duration, positive
from tinydit_ray.grid import PLACEMENTS
from tinydit_ray.sweep.errors import BAD_CELL, INTERRUPTED, OK, USAGE, SweepBroken, UsageError
from tinydit_ray.sweep.options import SweepOptions, options_from
from tinydit_ray.sweep.parser import parser
from tinydit_ray.sweep.quiet import make_console
from tinydit_ray.sweep.resume import parse


def speed_grid(arguments: list[str]) -> int:
    """Time and score a grid of setups; with no argument the five published ones."""
    from tinydit_ray.sweep.driver import run_sweep
    from tinydit_ray.sweep.optuna import TRIALS, add_search, prepare_search
    from tinydit_ray.sweep.repeat import finish_repeat

    p = parser("speed_grid.py", speed_grid.__doc__ or "")
    add_search(p)
    args = parse(p, arguments)
    prepare_search(args)
    options = options_from(args, default_grid="published", command=["speed-grid", *arguments])
    if args.search:
        return _searched(options, args.trials or TRIALS)
    return run_sweep(options, make_console(), finish_repeat if options.repeated else None)


def _searched(options: SweepOptions, trials: int) -> int:
    from tinydit_ray.sweep.driver import run_sweep
    from tinydit_ray.sweep.optuna import SearchedSweep, finish_search, plan_search

    options.trials = trials
    if options.dry_run:
        plan_search(options, make_console())
        return OK
    return run_sweep(options, make_console(), finish_search, make=SearchedSweep)


def null_check(arguments: list[str]) -> int:
    """Time one cell against itself several times: the noise floor of this machine, and what it can show."""
    from tinydit_ray.sweep.driver import run_sweep
    from tinydit_ray.sweep.null import finish_null

    p = parser("null_check.py", null_check.__doc__ or "")
    p.add_argument("--comparisons", type=count(2), default=8, help="how many times over (default: 8)")
    args = parse(p, arguments)
    if args.steps is None:
        args.steps = 0  # nothing is trained: the timing is in question
    options = options_from(args, default_grid="null", command=["null-check", *arguments])
    if options.placement != PLACEMENTS[0]:
        raise UsageError(f"--placement {options.placement}: a noise floor is of one kind of node; --on KIND names it")
    options.repeats = args.comparisons
    options.time_s = args.time_s or 30.0
    options.self_control = True
    return run_sweep(options, make_console(), finish_null)


def quality_grid(arguments: list[str]) -> int:
    """Train model sizes with plain and fast settings for a budget: what quality each reaches, and when."""
    from tinydit_ray.sweep.driver import run_sweep
    from tinydit_ray.sweep.quality import QualitySweep, quality_options

    args = parse(quality_parser(), arguments)
    return run_sweep(quality_options(args, ["quality-grid", *arguments]), make_console(), make=QualitySweep)


def quality_parser() -> argparse.ArgumentParser:
    p = parser("quality_grid.py", quality_grid.__doc__ or "")
    own = p.add_argument_group("quality grid")
    own.add_argument(
        "--train-time", dest="train_s", type=duration, metavar="2m",
        help="seconds of training per cell, compiling included, scores not (default: 2m, unless --steps is given)",
    )  # fmt: skip
    own.add_argument(
        "--target", type=positive, default=0.3, metavar="MSE",
        help="velocity MSE whose moment is looked for: time to quality (default: 0.3)",
    )  # fmt: skip
    own.add_argument("--profile", metavar="best.yaml", help="the settings that a speed grid recommends, at each size")
    own.add_argument("--asha", action="store_true", help="end cells that are behind early (ASHA, through Ray Tune)")
    return p


def scaling_grid(arguments: list[str]) -> int:
    """Time setups with 1, 2, 4 … data-parallel workers: strong scaling (one batch shared) and weak (a batch each)."""
    from tinydit_ray.sweep.driver import run_sweep
    from tinydit_ray.sweep.scaling import KINDS, ScalingSweep, scaling_options

    p = parser("scaling_grid.py", scaling_grid.__doc__ or "")
    p.add_argument("--scaling", choices=(*KINDS, "both"), default="both", help="what to time (default: both)")
    args = parse(p, arguments)
    return run_sweep(scaling_options(args, ["scaling-grid", *arguments]), make_console(), make=ScalingSweep)


def overhead(arguments: list[str]) -> int:
    """Seconds that Ray's documented pattern, our path and --no-ray cost a trial, measured in one run."""
    from tinydit_ray.sweep.overhead import run_overhead

    p = parser("overhead.py", overhead.__doc__ or "")
    p.add_argument("--trials", type=count(1), default=3, help="trials of each path after a first one (default: 3)")
    args = parse(p, arguments)
    args.quick, args.rounds, args.time_s, args.steps = True, 1, args.time_s or 3.0, args.steps or 0
    options = options_from(args, default_grid="null", command=["overhead", *arguments])
    if options.address:
        raise UsageError(f"--address {options.address}: what Ray costs a trial is measured on this machine")
    return run_overhead(options, make_console(), args.trials)


def autotune(arguments: list[str]) -> int:
    """Find the fastest setup without the full product: switch by switch, then a run-off of growing time."""
    from tinydit_ray.sweep.autotune import TunedSweep, finish_autotune, plan_autotune
    from tinydit_ray.sweep.driver import run_sweep

    args = parse(parser("autotune.py", autotune.__doc__ or ""), arguments)
    if args.quick and args.rounds is None:
        args.rounds = 2  # a choice is checked in another process
    grid = "tune-gpu" if args.device == "cuda" or (args.device == "auto" and _has_cuda()) else "tune-cpu"
    options = options_from(args, default_grid=grid, command=["autotune", *arguments])
    if options.dry_run:
        plan_autotune(options, make_console())
        return OK
    return run_sweep(options, make_console(), finish_autotune, make=TunedSweep)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "speed-grid": speed_grid,
    "autotune": autotune,
    "quality-grid": quality_grid,
    "scaling-grid": scaling_grid,
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
    except SweepBroken as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_CELL
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in COMMANDS:
        print(f"usage: tinydit-sweep COMMAND [options]; commands: {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(0 if arguments in (["-h"], ["--help"]) else USAGE)
    sys.exit(run(COMMANDS[arguments[0]], arguments[1:]))
