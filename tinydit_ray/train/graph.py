"""The whole training step as one CUDA graph: forward, backward, clip and optimiser, captured once, replayed.

A replay is one launch, so a step that waits for Python and for kernel launches no longer does. The recipe is
PyTorch's ("CUDA semantics", section CUDA Graphs, whole-network capture).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARMUP_STEPS = 3  # before a capture, on a side stream: kernels compile, libraries take their workspaces


class StepGraph:
    """Replays ``update(batch) -> loss`` on batches of one shape; the first call captures it.

    Args:
        update: one optimiser step that never waits for the device.
        weights: the tensors it changes, optimiser state apart.
        optimizer: its state must live on the device (capturable).

    The capture itself trains nothing: weights, optimiser state and the device's random state are put back.
    """

    def __init__(
        self, update: Callable[[Any], Tensor], weights: list[Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        self.update, self.weights, self.optimizer = update, weights, optimizer
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Any) -> Tensor:
        if self.graph is None:
            self._capture(batch)
        self._fill(batch)
        assert self.graph is not None
        self.graph.replay()
        return self.loss.clone()  # the next replay writes over the loss

    def forget(self) -> None:
        """Capture again at the next call: the tensors that the graph knows have been replaced."""
        self.graph = None

    def reset_optimizer(self) -> None:
        """Optimiser state as before the first step, in the tensors that the graph knows."""
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def _capture(self, batch: Any) -> None:
        self.static = [tensor.clone() for tensor in _tensors(batch)]
        static = self.static[0] if isinstance(batch, Tensor) else tuple(self.static)
        put_back = self._remember()
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARMUP_STEPS):
                self.update(static)
        current.wait_stream(side)
        put_back()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss = self.update(static)
        self.graph = graph

    def _fill(self, batch: Any) -> None:
        given = _tensors(batch)
        if [tensor.shape for tensor in given] != [tensor.shape for tensor in self.static]:
            raise ValueError(
                f"cuda_graph on: the step was captured for a batch of {[tuple(t.shape) for t in self.static]},"
                f" this one is {[tuple(t.shape) for t in given]}"
            )
        for static, tensor in zip(self.static, given, strict=True):
            static.copy_(tensor, non_blocking=True)

    def _remember(self) -> Callable[[], None]:
        """Copies of all that a step changes; the returned call puts them back in place."""
        weights = [tensor.detach().clone() for tensor in self.weights]
        state = {p: {k: v.clone() for k, v in s.items()} for p, s in self.optimizer.state.items()}
        random = torch.cuda.get_rng_state()

        @torch.no_grad()
        def put_back() -> None:
            for tensor, before in zip(self.weights, weights, strict=True):
                tensor.copy_(before)
            for parameter, now in self.optimizer.state.items():
                for key, tensor in now.items():
                    if parameter in state:
                        tensor.copy_(state[parameter][key])
                    else:
                        tensor.zero_()  # AdamW starts from zeros
            torch.cuda.set_rng_state(random)

        return put_back


def _tensors(batch: Any) -> list[Tensor]:
    return [batch] if isinstance(batch, Tensor) else list(batch)
