"""A sweep's numbers for other programs, and a card to paste.

python analysis/export.py runs/NAME --out export        summary.csv, summary.parquet, summary.md, rows/
python analysis/export.py tinydit --tracking-uri sqlite:///mlflow.db

The summary has one row per cell; rows/ has one per cell and round, in Parquet partitioned by sweep, which DuckDB,
pandas and polars read as one table. What was not measured is missing there, never a zero or a word.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from analysis.cells import Cell, cells_of, groups_of
from analysis.load import SweepData, load, table_of
from tinydit_ray.atomic import replacing
from tinydit_ray.record import COLUMNS
from tinydit_ray.sweep.errors import OK, USAGE, UsageError
from tinydit_ray.tracking import mask_text

_WORDS = ("sweep", "sweep_id", "created_at", "node_kind", "data_source", "data_digest", "cell_id", "cell_name")
# column of the summary -> key of a cell; a column keeps the name that it has in the rows
_NUMBERS = {
    "ms_per_step_pooled": "ms", "speedup_pooled": "speedup", "speedup_pooled_ci_low": "low",
    "speedup_pooled_ci_high": "high", "first_step_s": "first_step", "compile_s": "compile",
    "break_even_steps": "break_even", "sample_ms_per_image": "sampling", "images_per_s": "images",
    "tflops_per_s": "tflops", "mfu": "mfu", "peak_rss_mb": "rss_mb", "peak_device_mb": "device_mb",
    "velocity_mse": "mse", "velocity_mse_ema": "mse_ema", "probe_fd": "fd", "train_loss_last": "loss",
    "train_wall_s": "wall",
}  # fmt: skip
_COUNTS = {"rounds": "rounds", "timed_steps": "timed", "probe_fd_n": "fd_n", "steps_trained": "steps"}
_TEXTS = {"verdict": "verdict", "quality_verdict": "quality", "status": "status", "probe_id": "probe"}
_CONFIG = [name for name in COLUMNS if name.startswith("config.")]
SUMMARY = pa.schema(
    [(name, pa.string()) for name in _WORDS]
    + [(name, pa.float64()) for name in _NUMBERS]
    + [(name, pa.int64()) for name in _COUNTS]
    + [(name, pa.string()) for name in (*_TEXTS, "reason", "product_version", "git_commit")]
    + [(name, {str: pa.string(), int: pa.int64(), float: pa.float64()}[COLUMNS[name]]) for name in _CONFIG]
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", metavar="SWEEP", help="folder, or run, experiment or name in MLflow")
    parser.add_argument("--out", type=Path, default=Path("export"), help="folder to write into (default: export)")
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow store of sweeps that are no folder")
    options = parser.parse_args(argv)
    try:
        for path in export(load(options.sweeps, options.tracking_uri), options.out):
            print(path)
    except UsageError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return USAGE
    return OK


def export(sweeps: Sequence[SweepData], out: Path) -> list[Path]:
    """Write everything; the paths. Raises UsageError where that cannot be."""
    paths = export_summary(sweeps, out)
    try:
        write_rows(sweeps, out / "rows")
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written ({error.strerror or error})") from None
    return [*paths, out / "rows"]


def export_summary(sweeps: Sequence[SweepData], out: Path) -> list[Path]:
    """The summary as CSV, Parquet and card."""
    table = summary_of(sweeps)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with replacing(out / "summary.csv") as temporary:
            pyarrow.csv.write_csv(table, temporary)
        with replacing(out / "summary.parquet") as temporary:
            pq.write_table(table, temporary)
        with replacing(out / "summary.md") as temporary:
            temporary.write_text("\n\n".join(card(sweep) for sweep in sweeps) + "\n", "utf-8")
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written ({error.strerror or error})") from None
    return [out / name for name in ("summary.csv", "summary.parquet", "summary.md")]


def write_rows(sweeps: Sequence[SweepData], folder: Path) -> None:
    """Every row, a folder per sweep (``sweep_id=…/``); a sweep that is written again takes its own one's place."""
    rows = [row for sweep in sweeps for row in sweep.rows]
    pq.write_to_dataset(
        table_of(rows), folder, partition_cols=["sweep_id"], existing_data_behavior="delete_matching",
        basename_template="rows-{i}.parquet",
    )  # fmt: skip


def summary_of(sweeps: Sequence[SweepData]) -> pa.Table:
    """One row per cell of every sweep."""
    found = [
        _row(sweep, cell) for sweep in sweeps for group in groups_of(sweep) for cell in cells_of(group["rows"])
    ]  # fmt: skip
    return pa.Table.from_pylist(found, schema=SUMMARY)


def _row(sweep: SweepData, cell: Cell) -> dict[str, Any]:
    first = cell["rows"][0]
    bad = next((row["reason"] for row in cell["rows"] if row["status"] != "ok" and row["reason"]), None)
    return {
        **{name: first.get(name) for name in (*_WORDS, *_CONFIG, "product_version", "git_commit")},
        "sweep": sweep.name, "created_at": str(sweep.content.get("created_at") or ""), "reason": bad,
        **{name: cell[key] for name, key in (_NUMBERS | _COUNTS | _TEXTS).items()},
    }  # fmt: skip


# --- card -------------------------------------------------------------------------------------------------------


def card(sweep: SweepData) -> str:
    """A benchmark card in Markdown: machine, versions, data, how often and how long, and a table with intervals."""
    content = sweep.content
    parts = [f"### {sweep.name}", "\n".join(f"- **{name}**: {words}" for name, words in facts(sweep) if words)]
    for group in groups_of(sweep):
        kind, source, digest = group["key"]
        if len(groups_of(sweep)) > 1:
            parts.append(f"{kind}, {source} {digest}")
        parts.append(markdown_table(cells_of(group["rows"])))
    control = (content.get("grid") or {}).get("control") or {}
    words = " ".join(f"{key}={value}" for key, value in sorted(control.items())) or "plain fp32, eager, own attention"
    parts.append(
        f"Speed-up: time of the control ({words}) ÷ time of the setup, alternating step by step in one process; 95 %"
        " interval over processes. probe-FD is a Fréchet distance in the features of a small classifier, not FID."
    )
    return "\n\n".join(parts)


def facts(sweep: SweepData) -> list[tuple[str, str]]:
    content = sweep.content
    machine, versions = content.get("machine") or {}, content.get("versions") or {}
    data, grid = content.get("data") or {}, content.get("grid") or {}
    rows = [row for row in sweep.rows if row["status"] == "ok"]
    threads = sorted({row["effective.threads"] for row in rows if row["effective.threads"]})
    gpus = ", ".join(str(gpu.get("name", gpu) if isinstance(gpu, dict) else gpu) for gpu in machine.get("gpus") or [])
    cpu = f"{machine.get('cpus') or machine.get('cores') or '?'} × {machine.get('cpu') or 'unknown CPU'}"
    libraries = [f"{name} {version}" for name, version in versions.items()]
    product = f"{content.get('product_version') or '?'} {content.get('git_commit') or ''}".strip()
    return [
        ("machine", ", ".join(filter(None, [cpu, f"{machine.get('memory_gb', '?')} GB", gpus]))),
        ("threads", ", ".join(map(str, threads))),
        ("versions", ", ".join([f"tinydit-ray {product}", *libraries])),
        ("data", f"{data.get('source', '')} {data.get('digest', '')}".strip()),
        ("date", str(content.get("created_at") or "")),
        ("n", f"{grid.get('rounds', '?')} rounds in processes of their own, {grid.get('steps', '?')} training steps"),
        ("command", mask_text(" ".join(map(str, content.get("command") or [])))),
    ]  # fmt: skip


def markdown_table(cells: Sequence[Cell]) -> str:
    samples = any(cell["sampling"] for cell in cells)
    heads = ["setup", "ms/image" if samples else "ms/step", "speed-up", "95 % interval", "verdict", "n",
             "first step s", "velocity MSE", "probe-FD"]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---|---:|---:|---|---|---|---:|---:|---:|"]
    for cell in cells:
        interval = f"{cell['low']:.3f} – {cell['high']:.3f}" if None not in (cell["low"], cell["high"]) else "–"
        words = cell["verdict"] or cell["status"]
        values = [
            cell["name"], _number(cell["sampling" if samples else "ms"], ".4g"), _number(cell["speedup"], ".3f"),
            interval, words, cell["count"], _number(cell["first_step"], ".1f"), _number(cell["mse"], ".4f"),
            _number(cell["fd"], ".1f"),
        ]  # fmt: skip
        lines.append("| " + " | ".join(value.replace("|", "\\|").replace("\n", " ") for value in values) + " |")
    return "\n".join(lines)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
