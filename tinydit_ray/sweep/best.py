"""From the rows of a sweep to ``best.yaml`` and the exact command that trains with it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tinydit_ray.atomic import replace_text
from tinydit_ray.bench.seeds import BETTER, WITHIN, WORSE
from tinydit_ray.config import AXES, Scalar
from tinydit_ray.sweep.kinds import by_kind

BEST_FILE = "best.yaml"
TRAIN_STEPS = 4000


@dataclass(frozen=True)
class Best:
    """The winner of a sweep: its row, the profile that was written, and the command that trains with it."""

    row: Mapping[str, Any]
    path: Path
    command: str
    passed: Sequence[Mapping[str, Any]] = ()  # faster ones that are worse in quality

    def lines(self) -> list[str]:
        """What a person is told at the end of a sweep."""
        row = self.row
        return [
            f"fastest, {quality_text(row)}: {row['cell_name']}, {speedup_text(row)}; written to {self.path}",
            f"train with it: {self.command}",
            *map(passed_text, self.passed),
        ]


def best_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The cell to train with: proven faster, every round ok, quality not worse, the highest pooled speed-up.

    ``rows`` are those of ``results.parquet``, one per cell and round. None where no cell is proven faster
    than the control. Cells that time the sampler, or train in several workers, are no candidates: their
    speed-up is over another control, and the training command runs in one process.
    """
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault(row["cell_id"], []).append(row)
    candidates = [rounds[0] for rounds in cells.values() if _was_timed(rounds) and all(map(_is_candidate, rounds))]
    return max(candidates, key=lambda row: row["speedup_pooled"], default=None)


def worse_and_faster(rows: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Cells that only their quality keeps from being the best: a person should know of them."""
    than = best["speedup_pooled"] if best else 0.0
    found = {row["cell_id"]: row for row in rows if row["quality_verdict"] == WORSE and row["verdict"] == "faster"}
    return [row for row in found.values() if row["speedup_pooled"] > than]


def passed_text(row: Mapping[str, Any]) -> str:
    return f"not recommended, since its quality is worse: {row['cell_name']}, {speedup_text(row)}"


def quality_text(row: Mapping[str, Any]) -> str:
    """What is known of the quality of a cell that is recommended."""
    verdict = row["quality_verdict"]
    words = {WITHIN: "quality within the seed spread", BETTER: "quality better than the control's seeds"}
    return words.get(verdict, "quality not judged (--seeds 3 judges it)")


def _was_timed(rounds: Sequence[Mapping[str, Any]]) -> bool:
    """Of a cell that was skipped in every round nothing is known."""
    return any(row["status"] == "ok" for row in rounds)


def _is_candidate(row: Mapping[str, Any]) -> bool:
    if row["status"] == "skipped":  # a round that a budget had no time for says nothing against the others
        return True
    worse = row["quality_verdict"] == WORSE
    trains = row["config.sampler"] == "eager" and row["config.workers"] == 1
    return row["status"] == "ok" and row["verdict"] == "faster" and not worse and trains


def profile_of(row: Mapping[str, Any]) -> dict[str, Scalar]:
    """Axis values of a row as ``--profile`` takes them: every axis, so that no default can change it."""
    return {name: _plain(row[f"config.{name}"]) for name in AXES}


def _plain(value: Any) -> Scalar:
    return value.item() if hasattr(value, "item") else value  # numpy's numbers, where rows come from parquet


def training_command(profile: Path | str, *, name: str, data: Mapping[str, Any] | None = None) -> str:
    """The exact command that trains with a profile, on the data of the sweep (``content["data"]``)."""
    words = ["python", "-m", "tinydit_ray.train", "--profile", str(profile)]
    words += ["--out", f"runs/{name}-best", "--steps", str(TRAIN_STEPS)]
    spec = (data or {}).get("spec")
    if spec:
        words += ["--data", spec["root"] or spec["source"]]
        words += ["--classes", ",".join(map(str, spec["classes"]))] if spec.get("classes") else []
    return shlex.join(words)


def write_bests(folder: Path, rows: Sequence[Mapping[str, Any]], content: Mapping[str, Any], console: Console) -> None:
    """Write and print the best of each kind of node: what is fastest on one need not be on another."""
    kinds = by_kind(rows)
    for kind, group in kinds.items():
        name = f"best-{kind}.yaml" if len(kinds) > 1 else BEST_FILE
        if len(kinds) > 1:
            console.print(f"on {kind}:", highlight=False)
        print_best(console, write_best(folder, group, content, name), group)


def write_best(
    folder: Path, rows: Sequence[Mapping[str, Any]], content: Mapping[str, Any], name: str = BEST_FILE
) -> Best | None:
    """Write ``best.yaml`` into the sweep's folder; None, and no file, where nothing is proven faster.

    ``content`` is the sweep's ``sweep.json``.
    """
    path = folder / name
    row = best_row(rows)
    if row is None:
        path.unlink(missing_ok=True)  # of an earlier session of the same sweep
        return None
    command = training_command(path, name=content.get("name") or folder.name, data=content.get("data"))
    replace_text(path, profile_text(row, command, content))
    return Best(row, path, command, worse_and_faster(rows, row))


def profile_text(row: Mapping[str, Any], command: str, content: Mapping[str, Any]) -> str:
    """A YAML map of axis: value, under a comment that says where it comes from."""
    machine = content.get("machine", {}).get("cpu", "")
    comment = [
        command,
        f"{row['cell_name']}: {speedup_text(row)}, {row['ms_per_step_pooled']:.4g} ms/step",
        quality_text(row),
        f"sweep {content.get('name', '')} on {row['node_kind'] or machine}, data {row['data_source']}",
    ]
    lines = [f"# {' '.join(line.splitlines())}" for line in comment]
    # a JSON scalar is a YAML scalar; words stay bare, as a person would write them
    lines += [
        f"{name}: {value if isinstance(value, str) else json.dumps(value)}"
        for name, value in profile_of(row).items()
    ]
    return "\n".join(lines) + "\n"


def print_best(console: Console, best: Best | None, rows: Sequence[Mapping[str, Any]] = ()) -> None:
    """``rows`` are those that the best was chosen from."""
    passed = [passed_text(row) for row in worse_and_faster(rows, None)]
    what = "faster than the control at no worse quality" if passed else "faster than the control"
    for line in best.lines() if best else [f"no cell is proven {what}, so there is no best.yaml", *passed]:
        console.print(line, highlight=False, soft_wrap=True)


def speedup_text(row: Mapping[str, Any]) -> str:
    """``1.92 times the control's speed [1.74, 2.12]``."""
    low, high = row["speedup_pooled_ci_low"], row["speedup_pooled_ci_high"]
    return f"{row['speedup_pooled']:.2f} times the control's speed [{low:.2f}, {high:.2f}]"
