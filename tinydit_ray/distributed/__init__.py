"""Sweeps on Ray: the only package that imports ray."""

from tinydit_ray.distributed.executor import RayExecutor

__all__ = ["RayExecutor"]
