"""What a person sees of a training run: a live bar on a terminal, elsewhere a plain line every so often."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 10.0


class Screen:
    """Progress of one session, towards ``total`` steps."""

    def __init__(self, total: int, batch_size: int) -> None:
        self.total, self.batch_size = total, batch_size
        self.console = Console(file=sys.stdout)
        self.numbers, self.last_line_s = "", 0.0
        self.bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}"), console=self.console, refresh_per_second=4,
        )  # fmt: skip
        self.task = self.bar.add_task("first step", total=total)

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def log(self, step: int, loss: float, ms: float | None, left_s: float | None) -> None:
        """Numbers of the last few steps; ``left_s`` is the time left to train."""
        self.numbers = f"loss {loss:.4f}"
        if ms:
            self.numbers += f"  {ms:.1f} ms/step  {1e3 * self.batch_size / ms:,.0f} images/s"
        if left_s is not None:
            self.numbers += f"  {clock(left_s)} left"
        self.bar.update(self.task, completed=step, description=self.numbers)
        now = time.monotonic()
        if not self.console.is_terminal and (now - self.last_line_s >= LINE_EVERY_S or step == self.total):
            self.say(f"step {step}/{self.total}  {self.numbers}")
            self.last_line_s = now


def clock(seconds: float) -> str:
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
