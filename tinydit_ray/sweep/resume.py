"""``--resume NAME``: with which options a sweep goes on, what may not have changed, what a killed driver left."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tinydit_ray.record import Record, as_record, damaged_lines
from tinydit_ray.sweep.errors import UsageError
from tinydit_ray.sweep.seeds import is_seed_row
from tinydit_ray.tracking.split import record_key

if TYPE_CHECKING:
    from tinydit_ray.sweep.folder import SweepFolder
    from tinydit_ray.sweep.options import SweepOptions

GRID_OPTIONS = ("grid", "sets", "repeat")  # one of them given anew replaces them all
OF_RAY = ("address", "concurrent", "max_failures", "wait_nodes_s")
OF_ONE_SESSION = ("name", "resume", "out", "dry_run", "cluster", "allow_changed")
SAME = {"product_version": "version", "git_commit": "commit", "data_digest": "data", "effective.torch": "torch"}
SAME_GRID = {"control": "control", "steps": "steps"}  # as in sweep.json's grid
_UNSET: Any = object()


def parse(p: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments; with --resume those the sweep was started with, under those given now.

    ``given`` holds what differs from the defaults, in plain types: what a later --resume starts from.
    """
    given = _given(p, arguments)
    if given.get("resume"):
        earlier = _earlier(Path(given.get("out") or p.get_default("out")), given["resume"])
        if any(name in given for name in GRID_OPTIONS):
            earlier = {name: value for name, value in earlier.items() if name not in GRID_OPTIONS}
        if given.get("ray") is False:  # what --no-ray excludes gives way to it
            earlier = {name: value for name, value in earlier.items() if name not in OF_RAY}
        given = {**earlier, **given}
    args = p.parse_args([])
    for name, value in given.items():
        setattr(args, name, Path(value) if name in ("repeat", "out", "cluster") else value)
    args.given = {name: value for name, value in given.items() if name not in OF_ONE_SESSION}
    return args


def _given(p: argparse.ArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    """Name → value of the options that stand in the arguments."""
    defaults = vars(p.parse_args([]))
    unset = argparse.Namespace(**{name: _UNSET for name, value in defaults.items() if not isinstance(value, list)})
    parsed = vars(p.parse_args(list(arguments), namespace=unset))
    found = {name: value for name, value in parsed.items() if value is not _UNSET and value != []}
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def _earlier(out: Path, name: str) -> dict[str, Any]:
    """The options in the sweep's ``sweep.json``; none where it has no such list (SweepFolder says what is wrong)."""
    try:
        content = json.loads((out.expanduser() / name / "sweep.json").read_text(encoding="utf-8"))
        options = content.get("options") or {}
        return {key: value for key, value in options.items() if key not in OF_ONE_SESSION}
    except (OSError, ValueError, AttributeError):
        return {}


def take_up(folder: SweepFolder, options: SweepOptions, content: dict[str, Any], console: Console) -> list[str]:
    """Go on in a sweep's folder: ``content`` becomes the same sweep's, finished rounds that a killed driver did not
    write down are added. Returns flags for the rows of this session. Raises UsageError."""
    before = folder.read_sweep()
    content["sweep_id"], content["created_at"] = before["sweep_id"], before["created_at"]
    records = folder.records()
    if damaged := damaged_lines(folder.records_path):
        console.print(f"{damaged} damaged lines of records.jsonl are left out; their rounds are run again")
    late = left_behind(folder.path, before["sweep_id"], records)
    flags = check_unchanged(folder.path.name, records + late, before, content, allow=options.allow_changed)
    for record in late:
        folder.append(record)
    if late:
        console.print(f"{len(late)} finished rounds were taken from their folders: the driver was ended before")
    here = {cell["cell_id"] for cell in content["grid"]["cells"]}
    if gone := len({row["cell_id"] for row in records + late if not is_seed_row(row)} - here):
        console.print(f"{gone} cells are no longer in the grid; their rows stay", highlight=False)
    return flags


def check_unchanged(
    name: str, records: Sequence[Record], before: Mapping[str, Any], now: Mapping[str, Any], *, allow: bool
) -> list[str]:
    """Flags for the rows of this session where what the finished rounds were measured with has changed.

    ``before`` and ``now`` are contents of ``sweep.json``. Raises UsageError where nothing may change.
    """
    if (script := _script(before)) != _script(now) and script:
        raise UsageError(f"--resume {name}: this is a sweep of {script}, not of {_script(now)}")
    kept = [row for row in records if row["status"] == "ok"]
    current = {
        "product_version": now["product_version"], "git_commit": now["git_commit"],
        "data_digest": now["data"]["digest"], "effective.torch": now["versions"].get("torch"),
    }  # fmt: skip
    changed: dict[str, str] = {}
    for column, word in SAME.items():
        others = sorted({_comparable(column, row[column]) for row in kept if row[column]} - {current[column]})
        if others and current[column]:
            changed[word] = f"{word} {', '.join(others)} → {current[column]}"
    for key, word in SAME_GRID.items() if kept else ():
        old, new = before.get("grid", {}).get(key), now["grid"][key]
        if old is not None and old != new:
            changed[word] = f"{word} {_words(old)} → {_words(new)}"
    if changed and not allow:
        raise UsageError(
            f"--resume {name}: the finished rounds were measured with something else ({'; '.join(changed.values())});"
            " --allow-changed goes on all the same and flags the new rows"
        )
    return [f"changed-{word}" for word in changed]


def _comparable(column: str, value: str) -> str:
    """torch calls itself 2.14.1+cu130 where its package is 2.14.1; the + of a commit is another one."""
    return value.split("+")[0] if column == "effective.torch" else value


def _script(content: Mapping[str, Any]) -> str:
    return str((content.get("command") or [""])[0])


def _words(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return ",".join(f"{key}={item}" for key, item in value.items()) or "the default"


def left_behind(folder: Path, sweep_id: str, records: Sequence[Record]) -> list[Record]:
    """Records of rounds that ended while their driver was being killed: in the round's folder, not in the list."""
    known = {record_key(row) for row in records}
    found = []
    for path in sorted((folder / "cells").glob("*/*/record.json")):
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(row, dict) or row.get("sweep_id") != sweep_id or not row.get("status"):
            continue
        record = as_record(row)
        if record is not None and record_key(record) not in known:
            found.append(record)
    return found
