"""A cluster that a sweep joins: the connection, its nodes, and how they are waited for."""

from __future__ import annotations

import ray

from tinydit_ray.distributed.autoscale import Autoscaler
from tinydit_ray.distributed.nodes import ClusterNodes
from tinydit_ray.distributed.start import ENVIRONMENT, environment, start


class RayCluster:
    """Joined at ``address``. Raises UsageError where nothing answers there."""

    def __init__(self, address: str, device: str, wait_s: float | None = None) -> None:
        self._joined = not ray.is_initialized()
        with environment(ENVIRONMENT):
            if self._joined:
                start(address, cpus=None)
        self.nodes = ClusterNodes(device)
        self.autoscaler = Autoscaler(wait_s)

    def close(self) -> None:
        """Leave the cluster; it stays as it is."""
        if ray.is_initialized():
            self.autoscaler.close()
        if self._joined and ray.is_initialized():
            ray.shutdown()
