"""The timing engine: first step apart, warm-up dropped, then one-step blocks of cell and control, A B B A.

The protocol is driven by two callables, the clock and the step, so that tests can drive it with a
fake clock. On CUDA the clock is a pair of events a step and the device is waited for only at the
ends of a window; on the CPU it is ``time.perf_counter``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any, Protocol

Step = Callable[[Any], Any]
Clock = Callable[[], float]

WARMUP_STEPS = 5  # with the first step, as the published timings drop them
MIN_QUADS = 4  # fewer pairs than this carry no interval


class Stopwatch(Protocol):
    """Times single steps within a window."""

    def time(self, step: Step, batch: Any) -> Any:
        """Run one step; returns a token that ``read`` turns into milliseconds."""

    def read(self, tokens: Sequence[Any]) -> list[float]:
        """Milliseconds of each step, waiting for the device where there is one."""


class HostStopwatch:
    """Wall time around each step; right where a step ends when its call returns (CPU)."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock

    def time(self, step: Step, batch: Any) -> float:
        start = self.clock()
        step(batch)
        return (self.clock() - start) * 1e3

    def read(self, tokens: Sequence[float]) -> list[float]:
        return list(tokens)


class CudaStopwatch:
    """CUDA events around each step; the host waits only when the window is read."""

    def time(self, step: Step, batch: Any) -> Any:
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step(batch)
        end.record()
        return start, end

    def read(self, tokens: Sequence[Any]) -> list[float]:
        import torch

        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in tokens]


class GroupStopwatch:
    """Times steps that several workers take together: all start at once, and a step takes what it took the
    slowest (``highest`` over workers, step by step)."""

    def __init__(
        self, watch: Stopwatch, align: Callable[[], None], highest: Callable[[Sequence[float]], list[float]]
    ) -> None:
        self.watch, self.align, self.highest = watch, align, highest

    def time(self, step: Step, batch: Any) -> Any:
        self.align()
        return self.watch.time(step, batch)

    def read(self, tokens: Sequence[Any]) -> list[float]:
        return self.highest(self.watch.read(tokens))


@dataclass
class Window:
    """Step times of one timed window, in the order they ran: two of each side per A B B A quad."""

    cell_ms: list[float] = field(default_factory=list)
    control_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    reached: bool | None = None  # whether the asked precision was reached; None where none was asked

    @property
    def quads(self) -> int:
        return len(self.cell_ms) // 2


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection inside a timed step would be charged to whichever side it hits."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def warm_up(step: Step, batches: Sequence[Any], steps: int = WARMUP_STEPS) -> None:
    """Run ``steps`` steps, going round the batches."""
    for batch in islice(cycle(batches), steps):
        step(batch)


def time_steps(
    step: Step,
    batches: Sequence[Any],
    *,
    steps: int = 50,
    warmup: int = WARMUP_STEPS,
    stopwatch: Stopwatch | None = None,
) -> tuple[float, list[float]]:
    """Time one training step by hand: (first step in ms, the ``steps - warmup`` steady ones in ms).

    ``steps`` counts all of them; the first ``warmup`` (the very first among them) are dropped.
    Raises ValueError where nothing would be left.
    """  # fmt: skip
    if steps <= warmup or warmup < 1:
        raise ValueError(f"steps {steps}: must be more than the {warmup} warm-up steps that are dropped (at least 1)")
    watch = stopwatch or HostStopwatch()
    supply = cycle(batches)
    with no_garbage_collection():
        tokens = [watch.time(step, next(supply)) for _ in range(steps)]
        times = watch.read(tokens)
    return times[0], times[warmup:]


def time_pairs(
    cell: Step,
    control: Step,
    batches: Sequence[Any],
    *,
    seconds: float,
    stopwatch: Stopwatch | None = None,
    clock: Clock = time.perf_counter,
    precise: Callable[[Window], bool] | None = None,
    limit_s: float = 0.0,
    check_every: int = 8,
    agree: Callable[[bool], bool] = bool,
) -> Window:
    """Alternate one-step blocks A B B A of cell and control for ``seconds``, at least ``MIN_QUADS`` quads.

    Both sides of a quad see the same batches. With ``precise`` the window goes on past ``seconds``
    until it says yes (asked every ``check_every`` quads, between steps) or ``limit_s`` have passed.
    ``agree`` makes one choice of those of several workers, whose clocks differ.
    """  # fmt: skip
    watch = stopwatch or HostStopwatch()
    window, waiting = Window(), list[Any]()
    supply = cycle(batches)
    start = clock()

    def goes_on() -> bool:
        elapsed = clock() - start
        if window.quads + len(waiting) // 4 < MIN_QUADS or agree(elapsed < seconds):
            return True
        if precise is None:
            return False
        _settle(watch, waiting, window)
        window.reached = precise(window)
        return not window.reached and agree(elapsed < limit_s)

    with no_garbage_collection():
        while goes_on():
            for _ in range(check_every if precise else 1):
                waiting += _run_quad(watch, cell, control, next(supply), next(supply))
        if waiting:
            _settle(watch, waiting, window)
    window.seconds = clock() - start
    return window


def _run_quad(watch: Stopwatch, cell: Step, control: Step, first: Any, second: Any) -> list[Any]:
    order = ((cell, first), (control, first), (control, second), (cell, second))
    return [watch.time(step, batch) for step, batch in order]


def _settle(watch: Stopwatch, waiting: list[Any], window: Window) -> None:
    """Read the steps that ran since the last time into the window; here, and only here, a device is waited for."""
    times = watch.read(waiting)
    waiting.clear()
    for a1, b1, b2, a2 in zip(*[iter(times)] * 4, strict=True):
        window.cell_ms += [a1, a2]
        window.control_ms += [b1, b2]
