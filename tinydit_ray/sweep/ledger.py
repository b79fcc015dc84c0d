"""What is known of each round so far: its attempts, whether it is done, and whether it needs no trial."""

from __future__ import annotations

from collections.abc import Iterable

from tinydit_ray.record import BAD_STATUSES, NODE_LOST_FLAG, Record, flags_of
from tinydit_ray.sweep.plan import Cell, Round


class Ledger:
    """The records of a sweep, found by cell and round without a search: a sweep may have thousands.

    ``new`` are those of this session: an older failure does not stop a resumed sweep.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.records: list[Record] = []
        self.new: list[Record] = []
        self._attempts: dict[tuple[str, int], list[Record]] = {}
        self._stopped: dict[str, Record] = {}  # cell id -> the record of this session that ends its rounds
        self._out_of_memory: list[Record] = []
        for record in records:
            self._enter(record)

    def _enter(self, record: Record) -> None:
        self.records.append(record)
        self._attempts.setdefault((record["cell_id"], record["round"]), []).append(record)

    def add(self, record: Record) -> None:
        self._enter(record)
        self.new.append(record)
        if NODE_LOST_FLAG in flags_of(record):
            return  # says nothing of the cell
        if record["status"] == "unsupported" or record["status"] in BAD_STATUSES:
            self._stopped.setdefault(record["cell_id"], record)
        if record["status"] == "oom":
            self._out_of_memory.append(record)

    def is_done(self, item: Round) -> bool:
        return any(row["status"] == "ok" for row in self._attempts_at(item))

    def next_attempt(self, item: Round) -> int:
        return 1 + max((row["attempt"] or 0 for row in self._attempts_at(item)), default=0)

    def times_lost(self, item: Round) -> int:
        return sum(NODE_LOST_FLAG in flags_of(row) for row in self._attempts_at(item))

    def _attempts_at(self, item: Round) -> list[Record]:
        return self._attempts.get((item.cell.cell_id, item.number), [])

    def skip_reason(self, item: Round, *, keep_larger: bool) -> tuple[str, str]:
        """Status and reason of a round that needs no trial, else two empty words: its cell cannot run or went
        wrong before, or a smaller one ran out of memory."""
        if row := self._stopped.get(item.cell.cell_id):
            if row["status"] == "unsupported":
                return "unsupported", row["reason"]
            return "skipped", f"{row['status']} in round {row['round']}"
        for row in self._out_of_memory:
            if not keep_larger and _is_larger(item.cell, row):
                why = f"oom at {row['cell_name']}: this cell is not smaller (--keep-larger runs it all the same)"
                return "skipped", why
        return "", ""


def _is_larger(cell: Cell, row: Record) -> bool:
    """Whether the cell needs at least the memory of one that ran out: no smaller in size and batch, and alike
    in everything else."""
    sizes = ("dim", "depth", "batch_size")
    config = cell.config.asdict()
    alike = all(row[f"config.{key}"] == value for key, value in config.items() if key not in (*sizes, "heads"))
    return alike and cell.cell_id != row["cell_id"] and all(config[key] >= row[f"config.{key}"] for key in sizes)
