"""A question to one node of the cluster, answered by a process there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NO_ANSWER = (ray.exceptions.RayError, TimeoutError)


def ask_node(node_id: str, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """What ``function`` returns on this node; it holds no CPU. Raises one of ``NO_ANSWER``."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=there)
    return ray.get(task.remote(*arguments), timeout=timeout_s)
