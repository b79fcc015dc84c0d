"""The command line that all sweep scripts share."""

from __future__ import annotations

import argparse
from pathlib import Path

from tinydit_ray.arguments import count, duration, fraction, positive
from tinydit_ray.grid import MANY_CELLS
from tinydit_ray.sweep.kinds import add_placement


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The parser of a sweep script with all shared options."""
    p = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    _what_to_measure(p.add_argument_group("what to measure"))
    _how_to_measure(p.add_argument_group("how to measure"))
    _how_to_score(p.add_argument_group("how to score"))
    _where_to_run(p.add_argument_group("where to run"))
    _what_comes_out(p.add_argument_group("what comes out"))
    return p


def _what_to_measure(what: argparse._ArgumentGroup) -> None:
    what.add_argument("--grid", metavar="FILE", help="grid file, or the name of one that comes with the product")
    what.add_argument(
        "--set", dest="sets", metavar="AXIS=V1,V2", action="append", default=[],
        help="axis values; several are multiplied (without --grid they are the whole grid)",
    )  # fmt: skip
    what.add_argument(
        "--model", metavar="PACKAGE.MODULE:FUNCTION", help="a net of your own instead of TinyDiT (docs/analysis.md)"
    )
    what.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        default=[],
        help="only the cells of this name or id, * and ? allowed; may be given several times",
    )
    what.add_argument("--repeat", type=Path, metavar="RECORD", help="the cell of an earlier record.json once more")
    what.add_argument("--quick", action="store_true", help="a smaller model and batch, one round, a shorter window")
    what.add_argument("--control", metavar="AXIS=VALUE,…", help="what cells are paired with (default: plain fp32)")
    what.add_argument("--data", default="auto", help="auto, cifar10, shapes, or a folder (default: auto)")
    what.add_argument("--classes", default="", metavar="1,9", help="only these classes")


def _how_to_measure(how: argparse._ArgumentGroup) -> None:
    how.add_argument("--rounds", type=count(1), help="processes each cell is timed in (default: 3)")
    how.add_argument(
        "--time", dest="time_s", type=positive, help="seconds of timing per cell, all rounds (default: 24)"
    )
    how.add_argument(
        "--ci",
        type=fraction,
        default=0.0,
        help="go on until the half-width of a round's interval is this, such as 0.02",
    )
    how.add_argument(
        "--budget",
        dest="budget_s",
        type=duration,
        metavar="30m",
        help="for the whole sweep: windows are shortened, then rounds after the first are skipped"
        " (default: the grid file's own, with --quick at most 200s, else none)",
    )
    how.add_argument(
        "--cell-timeout",
        dest="cell_timeout_s",
        type=duration,
        metavar="10m",
        help="end a cell's round after this long (default: 10m)",
    )
    how.add_argument(
        "--memory-limit",
        dest="memory_limit_gb",
        type=positive,
        metavar="GB",
        help="memory of one trial; beyond it the cell is oom (default: 90 %% of what is free)",
    )
    how.add_argument(
        "--wait-quiet",
        dest="wait_quiet_s",
        type=positive,
        default=0.0,
        metavar="S",
        help="before a window wait up to S seconds until other processes use under 10 %% of the CPUs",
    )
    how.add_argument(
        "--keep-larger", action="store_true", help="run larger cells also after a smaller one ran out of memory"
    )


def _how_to_score(how: argparse._ArgumentGroup) -> None:
    how.add_argument("--steps", type=count(0), help="training steps before scoring, in round 1 (default: 100; 0: none)")
    how.add_argument(
        "--fd-n",
        dest="fd_images",
        type=count(0),
        default=250,
        metavar="N",
        help="images sampled for probe-FD after training (default: 250; 0: none)",
    )
    how.add_argument(
        "--ema",
        type=fraction,
        default=0.0,
        metavar="DECAY",
        help="also average the weights with this decay, such as 0.999, and score the average beside the raw ones",
    )
    how.add_argument(
        "--seeds",
        type=count(2),
        default=0,
        metavar="N",
        help="train and score the control with N more seeds (3, say): their spread decides whether a cell's quality is"
        " worse or better (default: not judged)",
    )


def _where_to_run(where: argparse._ArgumentGroup) -> None:
    where.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    where.add_argument(
        "--workers",
        metavar="N[,N]",
        help="data-parallel workers of a trial, sharing its batch; the same as --set workers=N (default: 1)",
    )
    where.add_argument(
        "--max-failures", type=count(0), default=0, metavar="N",
        help="start a trial of several workers again, up to N times, when one of them dies: it is timed anew, and its"
        " training goes on from the last checkpoint (default: 0, its round has failed)",
    )  # fmt: skip
    where.add_argument(
        "--cpus-per-worker",
        type=count(1),
        help="CPUs and threads of each worker (default: all of a node, shared by the most workers in the grid)",
    )
    where.add_argument("--gpus-per-worker", type=count(0), help="GPUs of each worker (default: 1 with --device cuda)")
    where.add_argument(
        "--no-ray", dest="ray", action="store_false", help="cells one after another in subprocesses, no Ray"
    )
    where.add_argument("--address", help="an existing Ray cluster (default: $RAY_ADDRESS, else start one here)")
    add_placement(where)


def _what_comes_out(out: argparse._ArgumentGroup) -> None:
    out.add_argument("--out", type=Path, default=Path("runs"), help="folder that holds the sweeps (default: runs)")
    out.add_argument("--name", help="name of this sweep's folder (default: grid and date)")
    out.add_argument(
        "--resume",
        metavar="NAME",
        help="go on with this sweep: run what is missing or not ok; options not given stay as they were",
    )
    out.add_argument(
        "--allow-changed",
        action="store_true",
        help="with --resume: go on although product, data, control or steps changed; new rows are flagged",
    )
    out.add_argument(
        "--storage",
        metavar="URI",
        help="keep each cell's trained weights there: a folder that all nodes see, or s3://bucket/prefix",
    )
    out.add_argument("--tracking-uri", help="MLflow store (default: sqlite:///mlflow.db here)")
    out.add_argument("--experiment", default="tinydit", help="MLflow experiment (default: tinydit)")
    out.add_argument("--dry-run", action="store_true", help="print the cells and the estimated time, run nothing")
    out.add_argument(
        "--cluster", type=Path, metavar="FILE", help="with --dry-run: hours and dollars on the nodes of a cluster file"
    )
    out.add_argument(
        "--system-metrics", action="store_true", help="CPU and memory of this machine every 10 s, in MLflow"
    )
    out.add_argument("--no-report", dest="report", action="store_false", help="no report.html and plots at the end")
    out.add_argument("--yes", action="store_true", help=f"run a grid of more than {MANY_CELLS:,} cells")
