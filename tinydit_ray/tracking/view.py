"""How the MLflow UI shows an experiment: as training runs, with the columns that answer the question.

MLflow keeps a shared view of the table of runs as an experiment tag; a link names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinydit_ray.tracking.uri import is_server, sqlite_path

# kind, name, width in pixels; in this order from the left
_COLUMNS = (
    ("metrics", "ms_per_step", 105),
    ("metrics", "velocity_mse", 105),
    ("metrics", "probe_fd", 85),
    ("metrics", "speedup_vs_control", 150),
    ("metrics", "speedup_pooled", 125),
    ("tags", "verdict", 160),
    ("metrics", "first_step_s", 100),
    ("tags", "status", 110),
    ("params", "config.attention", 125),
    ("params", "config.precision", 125),
    ("params", "config.compile", 120),
    ("attributes", "Dataset", 150),
)
# of the runs in charts, in the order of the grid; matplotlib's "tab20"
_COLOURS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
    "#aec7e8", "#ffbb78", "#98df8a", "#ff9896", "#c5b0d5", "#c49c94", "#f7b6d2", "#c7c7c7", "#dbdb8d", "#9edae5",
)  # fmt: skip
_FIRST = {"attributes.`Run Name`": 330, "runDateAndNestInfo": 130}
_NOTE = (
    "Sweeps of TinyDiT settings. A run without a parent is a sweep, its children are the rounds of its cells."
    " `ms_per_step` is a round's own time, `speedup_vs_control` the paired comparison with the control inside"
    " that round, `speedup_pooled` and `verdict` the result over all rounds. `probe_fd` is not FID."
)


def colour_tags(sweep: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, str]:
    """The colour of a round: all rounds of a cell have one. MLflow's own, by run id, are often the same for several."""
    cells = (sweep.get("grid") or {}).get("cells") or []
    places = [place for place, cell in enumerate(cells) if cell.get("cell_id") == record.get("cell_id")]
    return {"mlflow.runColor": _COLOURS[places[0] % len(_COLOURS)]} if places else {}


def _view(**facets: Any) -> str:
    names = {f"{kind}.`{name}`": width for kind, name, width in _COLUMNS}
    state = {
        "selectedColumns": list(names),
        "columnOrder": [*_FIRST, *names, "duration"],
        "columnWidths": {**_FIRST, **names, "duration": 90},
        **facets,
    }
    return json.dumps(state)


SWEEPS, ROUNDS = "tinydit-sweeps", "tinydit-rounds"  # the views: nested by sweep; all rounds, fastest first
VIEW_PREFIX = "mlflow.sharedViewState."
_VIEWS = {
    SWEEPS: _view(),
    ROUNDS: _view(
        searchFilter="tags.run_kind = 'round'", orderByKey="metrics.`ms_per_step`", orderByAsc=True
    ),
}
# Without the kind, MLflow 3 asks whether the experiment is about language models.
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",
    "mlflow.experiment.primaryMetric.name": "ms_per_step",
    "mlflow.experiment.primaryMetric.greaterIsBetter": "False",
    "mlflow.note.content": _NOTE,
    **{f"{VIEW_PREFIX}{name}": state for name, state in _VIEWS.items()},
}


def experiment_link(server: str, experiment_id: str, view: str = SWEEPS) -> str:
    """The experiment's table of runs in one of the views; MLflow 3 opens on language models unless told."""
    query = f"workflowType=machine_learning&viewStateShareKey={view}"
    return f"{server}/#/experiments/{experiment_id}/runs?{query}"


def how_to_open(uri: str, experiment_id: str) -> str:
    """What a person does to see the experiment of an absolute store URI: a server has its UI already."""
    if is_server(uri):
        return f"open {experiment_link(re.sub('://[^/]*@', '://', uri), experiment_id)}"
    command = f"python -m tinydit_ray.tracking ui --tracking-uri '{uri}'"
    return f"open it with: {'make ui, or ' if sqlite_path(uri) == Path.cwd() / 'mlflow.db' else ''}{command}"
