"""Nets that go wrong in a trial, and only there, for ``--set network=fault_nets:…``; in the driver they are plain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from own_nets import ConvNet
from torch import Tensor, nn

CHILD_S = "98765"  # what the hanging cell's child sleeps: found by it


def phase() -> str:
    """What the trial that this process runs is doing; "" outside of one. Its output goes to log.txt of its folder."""
    try:
        folder = Path(os.readlink("/proc/self/fd/1")).parent
        return (folder / "phase").read_text() if folder.joinpath("log.txt").exists() else ""
    except OSError:
        return ""


class Faulty(ConvNet):
    """Calls ``fault`` when it is used in ``when``, a phase of a trial."""

    def __init__(self, when: str, fault: Callable[[], None]) -> None:
        super().__init__(8)
        self.when, self.fault = when, fault
        self.check()

    def check(self) -> None:
        if phase() == self.when:
            self.fault()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.check()
        return super().forward(x, t)


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_me() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang() -> None:
    """With a child, as compilers and data loaders have."""
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({CHILD_S})"])
    time.sleep(1e6)


def children() -> list[int]:
    """Processes that hanging cells have left."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if CHILD_S.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def plain() -> nn.Module:
    return ConvNet(8)


def killed_in_build() -> nn.Module:
    return Faulty("build", kill_me)


def killed_in_timing() -> nn.Module:
    return Faulty("timing", kill_me)


def killed_in_training() -> nn.Module:
    return Faulty("training", kill_me)


def killed_in_scores() -> nn.Module:
    return Faulty("scores", kill_me)


def hanging() -> nn.Module:
    return Faulty("training", hang)


def stopped() -> nn.Module:
    return Faulty("build", stop_me)
