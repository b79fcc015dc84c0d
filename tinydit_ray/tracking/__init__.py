"""Sweeps in MLflow: one run per sweep, a child run per cell and round.

MLflow is imported when a store is opened, not before.
"""

from tinydit_ray.tracking.files import files_of, round_name, summary_files
from tinydit_ray.tracking.null import NullTracker
from tinydit_ray.tracking.tracker import Tracker
from tinydit_ray.tracking.uri import TrackingError, absolute_uri, mask, mask_text
from tinydit_ray.tracking.view import how_to_open

__all__ = [
    "NullTracker",
    "Tracker",
    "TrackingError",
    "absolute_uri",
    "files_of",
    "how_to_open",
    "mask",
    "mask_text",
    "round_name",
    "summary_files",
]
