"""The timing engine, driven by a clock that moves only when a step says so."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tinydit_ray.bench import stats
from tinydit_ray.bench.timing import (
    MIN_QUADS,
    WARMUP_STEPS,
    HostStopwatch,
    Window,
    no_garbage_collection,
    time_pairs,
    time_steps,
    warm_up,
)
from tinydit_ray.bench.verdict import pooled_speedups, verdict

BATCHES = list("abcdef")


@pytest.fixture(autouse=True)
def _collector_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


class FakeTime:
    """A clock and steps that take the seconds they are told; every step is noted."""

    def __init__(self) -> None:
        self.now = 100.0
        self.log: list[tuple[str, Any]] = []

    def __call__(self) -> float:
        return self.now

    @property
    def watch(self) -> HostStopwatch:
        return HostStopwatch(self)

    def step(self, name: str, seconds: float | Sequence[float] | Callable[[], float]) -> Callable[[Any], None]:
        costs = iter(seconds) if isinstance(seconds, Sequence) else None

        def step(batch: Any) -> None:
            self.log.append((name, batch))
            self.now += next(costs) if costs else seconds() if callable(seconds) else seconds  # type: ignore[operator]

        return step

    def pairs(self, cell: Any, control: Any, batches: Sequence[Any] = BATCHES, **how: Any) -> Window:
        a = cell if callable(cell) else self.step("cell", cell)
        b = control if callable(control) else self.step("control", control)
        return time_pairs(a, b, batches, stopwatch=self.watch, clock=self, **how)


def noisy(median: float) -> Callable[[], float]:
    """Step lengths between half and twice the median, without any end."""
    lengths = random.Random(median)
    return lambda: median * 2 ** lengths.uniform(-1, 1)


def jumping(median: float) -> Callable[[], float]:
    """Step lengths that jump between half and twice the median, in turn."""
    lengths = itertools.cycle([median / 2, median, median * 2, median])
    return lambda: next(lengths)


# --- order and batches ------------------------------------------------------------------------------------


def test_blocks_run_a_b_b_a_and_both_sides_see_the_same_batches():
    clock = FakeTime()
    clock.pairs(0.25, 0.5, seconds=0)
    quads = [clock.log[i : i + 4] for i in range(0, len(clock.log), 4)]
    supply = itertools.cycle(BATCHES)
    for quad in quads:
        first, second = next(supply), next(supply)
        assert quad == [("cell", first), ("control", first), ("control", second), ("cell", second)]
    of = {side: [batch for name, batch in clock.log if name == side] for side in ("cell", "control")}
    assert of["cell"] == of["control"]


def test_an_odd_number_of_batches_goes_round():
    clock = FakeTime()
    clock.pairs(0.25, 0.5, batches="xyz", seconds=0)
    assert [batch for name, batch in clock.log if name == "cell"] == list("xyzxyzxy")


def test_one_batch_is_enough():
    clock = FakeTime()
    assert clock.pairs(0.25, 0.5, batches=["x"], seconds=0).quads == MIN_QUADS


# --- how long ---------------------------------------------------------------------------------------------


def test_at_least_the_quads_that_carry_an_interval():
    window = FakeTime().pairs(0.25, 0.5, seconds=0)
    assert window.quads == MIN_QUADS == 4
    assert len(window.cell_ms) == len(window.control_ms) == 8


def test_the_window_ends_with_the_first_whole_quad_past_its_seconds():
    window = FakeTime().pairs(0.25, 0.5, seconds=9.0)  # a quad is 1.5 s
    assert (window.quads, window.seconds) == (6, 9.0)
    assert FakeTime().pairs(0.25, 0.5, seconds=9.1).quads == 7
    assert window.reached is None


def test_a_step_longer_than_the_window_still_gives_whole_quads():
    window = FakeTime().pairs(50.0, 60.0, seconds=1.0)
    assert (window.quads, len(window.cell_ms), len(window.control_ms)) == (4, 8, 8)


# --- what is timed, in which unit, and which way the ratio points -----------------------------------------


def test_times_are_milliseconds_and_above_one_is_faster():
    window = FakeTime().pairs(0.25, 0.5, seconds=30)
    assert set(window.cell_ms) == {250.0}
    assert set(window.control_ms) == {500.0}
    ratios = stats.abba_ratios(window.cell_ms, window.control_ms)
    assert set(ratios) == {2.0}
    speedup = stats.round_speedup(ratios)
    assert (speedup.value, speedup.ci_low, speedup.ci_high) == (2.0, 2.0, 2.0)
    assert verdict(pooled_speedups({"c": [speedup] * 3})["c"]) == "faster"


def test_a_cell_that_takes_longer_is_slower():
    window = FakeTime().pairs(0.5, 0.25, seconds=30)
    speedup = stats.round_speedup(stats.abba_ratios(window.cell_ms, window.control_ms))
    assert speedup.value == 0.5
    assert verdict(pooled_speedups({"c": [speedup] * 3})["c"]) == "slower"


def test_derived_units_by_hand():
    assert stats.images_per_s(250.0, 128) == 512.0  # 4 steps a second of 128
    assert stats.tflops_per_s(100.0, 50.0) == 2.0  # 100 GFLOP in 0.05 s are 2,000 GFLOP/s
    assert stats.break_even_steps(10.0, 100.0, 150.0) == 200.0  # 10 s at 50 ms a step
    assert stats.break_even_steps(10.0, 150.0, 100.0) is None


def test_a_drift_of_the_machine_cancels_in_the_ratio():
    """Each step is 1 % longer than the one before; raw medians move by half, the ratio does not."""
    clock, slowness = FakeTime(), itertools.count()

    def drifting(seconds: float) -> Callable[[], float]:
        return lambda: seconds * (1 + 0.01 * next(slowness))

    window = clock.pairs(clock.step("cell", drifting(0.25)), clock.step("control", drifting(0.5)), seconds=30)
    assert window.cell_ms[-1] > 1.5 * window.cell_ms[0]
    assert stats.abba_ratios(window.cell_ms, window.control_ms) == pytest.approx(2.0, rel=1e-12)


def test_a_constant_offset_between_first_and_second_step_does_not_favour_a_side():
    """Whatever runs second in a pair is 10 % slower (a cold cache, say): each side is second once a quad."""
    clock, turn = FakeTime(), itertools.count()

    def step() -> float:
        return 0.25 * (1.1 if next(turn) % 2 else 1.0)

    window = clock.pairs(clock.step("cell", step), clock.step("control", step), seconds=10)
    assert stats.abba_ratios(window.cell_ms, window.control_ms) == pytest.approx(1.0, rel=1e-12)


# --- what must not move ms per step -----------------------------------------------------------------------


def test_a_slow_first_step_and_a_slow_warm_up_are_apart():
    clock = FakeTime()
    first, steady = time_steps(clock.step("s", [9.0, 7.0, 3.0, 2.0, 1.0] + [0.25] * 20), BATCHES, steps=25,
                               stopwatch=clock.watch)  # fmt: skip
    assert first == 9000.0
    assert steady == [250.0] * 20


def test_time_between_steps_is_not_charged_to_them():
    """An evaluation before the window, and the precision asked for within it."""
    clock = FakeTime()
    slow_first = clock.step("cell", [60.0] + [1.0] * (WARMUP_STEPS - 1) + [0.25] * 1000)
    warm_up(slow_first, BATCHES)
    clock.now += 500.0  # an evaluation

    def precise(window: Window) -> bool:
        clock.now += 40.0
        return window.quads >= 24

    window = clock.pairs(slow_first, 0.5, seconds=1.0, precise=precise, limit_s=1e9)
    assert set(window.cell_ms) == {250.0}
    assert set(window.control_ms) == {500.0}
    assert window.quads == 24
    assert window.seconds == 24 * 1.5 + 3 * 40.0


def test_twenty_and_sixty_timed_steps_agree():
    medians = []
    for steps in (20, 60):
        clock = FakeTime()
        step = clock.step("s", jumping(0.25))
        _, steady = time_steps(step, BATCHES, steps=steps + WARMUP_STEPS, stopwatch=clock.watch)
        assert len(steady) == steps
        medians.append(statistics.median(steady))
    assert medians[0] == medians[1] == 250.0


@pytest.mark.slow
def test_twenty_and_sixty_steps_of_a_real_clock_agree():
    def step(_batch: Any) -> None:
        time.sleep(0.003)

    medians = [statistics.median(time_steps(step, BATCHES, steps=n + WARMUP_STEPS)[1]) for n in (20, 60)]
    assert medians[0] == pytest.approx(medians[1], rel=0.3)
    assert all(3.0 <= median < 12.0 for median in medians)


def test_steps_are_given_the_batches_in_turn():
    clock = FakeTime()
    time_steps(clock.step("s", 0.25), "abc", steps=8, stopwatch=clock.watch)
    assert [batch for _, batch in clock.log] == list("abcabcab")


@pytest.mark.parametrize(("steps", "warmup"), [(5, 5), (4, 5), (0, 5), (-1, 5), (10, 0), (1, 1)])
def test_steps_that_leave_nothing_to_time_are_refused(steps: int, warmup: int):
    clock = FakeTime()
    with pytest.raises(ValueError, match=f"steps {steps}.*{warmup} warm-up"):
        time_steps(clock.step("s", 0.25), BATCHES, steps=steps, warmup=warmup)
    assert clock.log == []


def test_one_step_more_than_the_warm_up_is_enough():
    clock = FakeTime()
    assert time_steps(clock.step("s", 0.25), BATCHES, steps=2, warmup=1, stopwatch=clock.watch) == (250.0, [250.0])


@pytest.mark.parametrize("batches", ["a", "ab", "abc", "abcde", "abcdefgh"])
@pytest.mark.parametrize("steps", [2, 5])
def test_a_warm_up_takes_the_steps_it_is_told_whatever_the_batches(batches: str, steps: int):
    clock = FakeTime()
    warm_up(clock.step("s", 0.25), batches, steps)
    assert [batch for _, batch in clock.log] == list(itertools.islice(itertools.cycle(batches), steps))


# --- until the interval is narrow enough ------------------------------------------------------------------


def reached(half_width: float) -> Callable[[Window], bool]:
    return lambda w: stats.ci_reached(stats.abba_ratios(w.cell_ms, w.control_ms), half_width)


def test_quiet_steps_reach_the_asked_interval_at_once():
    window = FakeTime().pairs(0.25, 0.5, seconds=3.0, precise=reached(0.02), limit_s=600)
    assert window.reached is True
    assert window.quads == 16  # ten are needed, and it is asked every eight


def test_the_asked_precision_never_shortens_the_window():
    asked: list[float] = []
    clock = FakeTime()

    def precise(window: Window) -> bool:
        asked.append(clock.now)
        return True

    window = clock.pairs(0.25, 0.5, seconds=30.0, precise=precise, limit_s=600)
    assert asked == [100.0 + 36.0]  # 24 quads: the first multiple of eight past 30 s
    assert (window.reached, window.seconds) == (True, 36.0)


def test_noise_goes_on_to_the_limit_and_is_said():
    clock = FakeTime()
    window = clock.pairs(clock.step("a", noisy(0.25)), clock.step("b", noisy(0.3)), seconds=3.0,
                         precise=reached(1e-6), limit_s=60.0)  # fmt: skip
    assert window.reached is False
    assert 60.0 <= window.seconds < 60.0 + 8 * 4 * 0.6


def test_a_limit_below_the_seconds_asks_once():
    window = FakeTime().pairs(0.25, 0.5, seconds=12.0, precise=lambda _w: False, limit_s=1.0)
    assert (window.reached, window.seconds) == (False, 12.0)


def test_times_are_read_at_the_end_alone_or_once_per_question():
    """Reading waits for a device, so it never happens between two steps without need."""
    clock, reads = FakeTime(), []

    class Watch(HostStopwatch):
        def read(self, tokens: Sequence[float]) -> list[float]:
            reads.append(len(tokens))
            return super().read(tokens)

    time_pairs(clock.step("a", 0.25), clock.step("b", 0.5), BATCHES, seconds=3.0, stopwatch=Watch(clock), clock=clock,
               precise=lambda w: w.quads >= 9, limit_s=600, check_every=3)  # fmt: skip
    assert reads == [24, 12]  # two groups until there are quads enough to ask, then one more


# --- the garbage collector --------------------------------------------------------------------------------


def test_the_collector_is_off_in_every_timed_step_and_on_again_after():
    seen: list[bool] = []

    def step(_batch: Any) -> None:
        seen.append(gc.isenabled())

    time_pairs(step, step, BATCHES, seconds=0)
    time_steps(step, BATCHES, steps=6)
    assert seen == [False] * (4 * MIN_QUADS + 6)
    assert gc.isenabled()


def test_the_collector_is_on_again_after_a_step_that_fails():
    def fail(_batch: Any) -> None:
        raise RuntimeError("out of memory")

    for timing in (lambda: time_pairs(fail, fail, BATCHES, seconds=1), lambda: time_steps(fail, BATCHES)):
        with pytest.raises(RuntimeError, match="out of memory"):
            timing()
        assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with no_garbage_collection():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_garbage_of_before_is_collected_before_the_window():
    class Node:
        pass

    node = Node()
    node.self = node  # type: ignore[attr-defined]
    import weakref

    alive = weakref.ref(node)
    del node
    with no_garbage_collection():
        assert alive() is None
