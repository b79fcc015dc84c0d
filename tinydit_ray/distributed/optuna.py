"""Ray's own OptunaSearch (several objectives, all to be low), asked and told by the sweep.

The sweep stays the one that hands out rounds, so that a proposal may take several of them, in several processes, and
its numbers are pooled before the search learns of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class OptunaAsk:
    """Proposes points of a space of words and numbers (axis -> its values), the first one being ``first``."""

    def __init__(
        self, axes: Mapping[str, Sequence[Any]], first: Mapping[str, Any], objectives: Sequence[str], seed: int
    ) -> None:
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.WARNING)  # it announces every study
        space: Any = {name: optuna.distributions.CategoricalDistribution(values) for name, values in axes.items()}
        self.search = OptunaSearch(
            space, metric=list(objectives), mode=["min"] * len(objectives), points_to_evaluate=[dict(first)], seed=seed
        )
        self.asked = 0

    def ask(self) -> tuple[str, dict[str, Any]]:
        """The id of a proposal, and its point."""
        self.asked += 1
        name = f"proposal-{self.asked}"
        return name, dict(self.search.suggest(name) or {})

    def tell(self, name: str, values: Mapping[str, float] | None) -> None:
        """The objectives of a proposal; None where it is not worth another try: it cannot run, went wrong, is no point
        of the grid, or is known already. Without a result OptunaSearch calls it pruned, which counts against the point;
        an error would be forgotten, and TPE would propose the same point for ever."""
        self.search.on_trial_complete(name, dict(values) if values else None)
