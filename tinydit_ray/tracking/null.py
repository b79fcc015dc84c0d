"""A tracker that tracks nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinydit_ray.record import Record

if TYPE_CHECKING:
    import pandas as pd


class NullTracker:
    """Tracks nothing: for sweeps on machines without MLflow."""

    uri = "off"
    run_id = experiment_id = ""
    unsent = 0

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def log_record(self, record: Record, files: Mapping[str, Path]) -> None:
        pass

    def tell(self, progress: str) -> None:
        pass

    def log_samples(self, samples: Sequence[Any]) -> None:
        pass

    def finish(self, *, status: str, summary: Mapping[str, Path], pooled: pd.DataFrame | None) -> None:
        pass

    def close(self) -> None:
        pass
