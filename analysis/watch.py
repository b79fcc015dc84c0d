"""A long sweep from another terminal, or from another machine through MLflow.

python analysis/watch.py runs/NAME                                           until it ends; Ctrl-C leaves it running
python analysis/watch.py NAME --tracking-uri http://tracking.example:5000    from another machine
python analysis/watch.py runs/NAME --once                                    print it once

Shows counts by status, the cells in work, the best so far and the time left, as the sweep's own screen does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from analysis.load import Row, SweepData, load
from tinydit_ray.sweep.errors import INTERRUPTED, OK, USAGE, UsageError
from tinydit_ray.sweep.progress import PROGRESS_FILE, Progress, Working, best_words, count_words
from tinydit_ray.sweep.screen import minutes, phase_of

BAR_WIDTH = 60
SILENT_S = 900.0  # a driver that wrote nothing for so long, beyond its own estimate, may be gone


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A sweep as it stands; ``progress`` is None where its driver wrote none."""

    sweep: SweepData
    progress: Progress | None
    total: int

    @property
    def rows(self) -> list[Row]:
        return self.sweep.rows

    @property
    def ended(self) -> bool:
        """By its run in MLflow, by its driver's word, or because nothing is missing. A sweep whose grid is not known
        has only begun: its run is made in MLflow before its ``sweep.json`` gets there."""
        if self.sweep.run_status not in ("", "RUNNING"):
            return True
        return self.progress.ended if self.progress else 0 < self.total <= len(self.rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", metavar="SWEEP", help="sweep folder, or a sweep's run or name in MLflow")
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow store, where SWEEP is no folder")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between looks (default: 5)")
    parser.add_argument("--once", action="store_true", help="print it once and end")
    options = parser.parse_args(argv)
    try:
        seen = look(options.sweep, options.tracking_uri)
        if options.once:
            Console(highlight=False).print(shown(seen))
            return OK
        return follow(options, seen)
    except UsageError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def follow(options: argparse.Namespace, seen: Seen) -> int:
    """Look again until the sweep has ended. A look that fails (a server away) is said, and tried again."""
    console = Console(highlight=False)
    with Live(shown(seen), console=console, auto_refresh=False) as live:
        while not seen.ended:
            time.sleep(max(0.2, options.every))
            try:
                seen = look(options.sweep, options.tracking_uri)
                live.update(shown(seen), refresh=True)
            except UsageError as error:
                live.update(Group(shown(seen), Text(f"not seen anew: {error}", "yellow")), refresh=True)
    if not console.is_terminal:
        console.print()  # a file or a pipe gets the last state alone, without its end of line
    return OK


def look(target: str, uri: str | None) -> Seen:
    """The last sweep of the target. Raises UsageError."""
    sweep = load([target], uri)[-1]
    grid = sweep.content.get("grid") or {}
    planned = len(grid.get("cells") or []) * int(grid.get("rounds") or 1)
    return Seen(sweep=sweep, progress=_progress(sweep), total=planned)


def _progress(sweep: SweepData) -> Progress | None:
    if sweep.folder is None:
        return Progress.from_json(sweep.tags.get("progress", ""))
    try:
        return Progress.from_json((sweep.folder / PROGRESS_FILE).read_text("utf-8", errors="replace"))
    except OSError:
        return None


def shown(seen: Seen) -> Group:
    """A bar and the lines of a sweep."""
    progress, rows = seen.progress, seen.rows
    done = len(rows)
    total = max(seen.total, done)
    if progress:  # a session of a sweep that was gone on with knows what it still has to do
        total = max(done, done + progress.total - progress.done - len(_recorded(progress.working, rows)))
    lines = [Text(f"{seen.sweep.name}  ({seen.sweep.origin})", "bold")]
    lines.append(Text(f"{done}/{total} rounds · {count_words(str(row['status']) for row in rows)} · {_state(seen)}"))
    lines += [Text(f"in work: {words}") for words in in_work(seen)]
    lines.append(Text(best_words(rows)))
    share = done / max(1, total)
    filled = round(BAR_WIDTH * share)
    bar = Text("━" * filled, "green") + Text("━" * (BAR_WIDTH - filled), "dim") + Text(f" {100 * share:.0f} %")
    return Group(lines[0], bar, *lines[1:])


def _recorded(working: Iterable[Working], rows: Sequence[Row]) -> list[Working]:
    """Those whose record is there already: it is written a moment before the driver says so."""
    ends = tuple(f"{row['cell_id']}/r{row['round']}-a{row['attempt']}" for row in rows)
    return [item for item in working if item.folder and item.folder.endswith(ends)]


def _state(seen: Seen) -> str:
    progress = seen.progress
    if seen.ended:
        return "ended"
    if progress is None and not seen.total:
        return "it is being started"
    if progress is None:
        return "its driver tells nothing of the time left"
    if progress.age_s > progress.left_s + SILENT_S:
        return f"no word for {minutes(progress.age_s)}: it may have been killed (--resume goes on with it)"
    return f"{minutes(max(0.0, progress.left_s - progress.age_s))} left"


def in_work(seen: Seen) -> list[str]:
    """Cells that run, for how long, and what they do where that can be read."""
    if seen.progress is None or seen.ended:
        return []
    found = []
    ended = _recorded(seen.progress.working, seen.rows)
    for item in (item for item in seen.progress.working if item not in ended):
        words = [item.cell, f"round {item.round}"]
        if seen.sweep.folder and item.folder:
            words.append(phase_of(seen.sweep.folder / item.folder))
        found.append(" · ".join([*words, f"for {minutes(item.since_s + seen.progress.age_s)}"]))
    return found


if __name__ == "__main__":
    sys.exit(main())
