"""From sweeps to answers: one frame from sweep folders or MLflow, a report, comparisons, a live view, exports.

With ``tinydit_ray.tracking`` the only place that imports MLflow, and only when a store is asked for.
"""
