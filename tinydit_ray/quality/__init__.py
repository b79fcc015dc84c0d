"""Quality scores of trained models: velocity MSE and probe-FD, with the probes the package ships.

``python -m tinydit_ray.quality.probe`` trains, checks and measures probes; docs/quality.md says what the
scores are and are not.
"""

from tinydit_ray.quality.classifier import Probe, image_stats, load_probe, probe_features, shipped_probes
from tinydit_ray.quality.frechet import FeatureStats, feature_stats, frechet_distance
from tinydit_ray.quality.grid import make_grid, save_grid, to_uint8
from tinydit_ray.quality.scores import (
    NOT_FID,
    SAMPLERS,
    Reference,
    anchors,
    comparable,
    fixed_noise,
    probe_for,
    probe_scores,
    reference_for,
    sample_images,
    score_model,
)
from tinydit_ray.quality.velocity import velocity_mse

__all__ = [
    "NOT_FID",
    "SAMPLERS",
    "FeatureStats",
    "Probe",
    "Reference",
    "anchors",
    "comparable",
    "feature_stats",
    "fixed_noise",
    "frechet_distance",
    "image_stats",
    "load_probe",
    "make_grid",
    "probe_features",
    "probe_for",
    "probe_scores",
    "reference_for",
    "sample_images",
    "save_grid",
    "score_model",
    "shipped_probes",
    "to_uint8",
    "velocity_mse",
]
