"""Noticing within seconds that Ray's own processes are gone.

Ray's library in the driver tries to reach a dead head for a minute and then ends the process without a word; with a
dead raylet it waits for ever. What the sweep has is on the disk by then, but nobody would be told.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import TracebackType

from tinydit_ray.sweep.errors import ExecutorLost

EVERY_S = 2.0
PATIENCE_S = 20.0  # for the head of a cluster that was joined: it may be started anew, or the network be slow
LEAVE_S = 8.0  # for Tune to return once the loss was noticed; it may be stuck inside Ray
NEEDED = ("gcs_server", "raylet")  # of the processes of a Ray that this driver started


class RayWatch:
    """A thread beside ``tuner.fit()``. ``check`` raises ExecutorLost in the thread that runs the trials; where that
    one never comes back, ``stuck`` is called with the reason, in this thread."""

    def __init__(self, stuck: Callable[[str], None]) -> None:
        import ray
        from ray._private import worker

        self.stuck, self.reason = stuck, ""
        self._node = worker._global_node
        self._head = ray.get_runtime_context().gcs_address
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="ray-watch")

    def __enter__(self) -> RayWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def check(self) -> None:
        if self.reason:
            raise ExecutorLost(self.reason)

    def _run(self) -> None:
        silent_s = 0.0
        while not self._ended.wait(EVERY_S):
            silent_s = 0.0 if self._head_answers() else silent_s + EVERY_S
            self.reason = self._dead_process() or (self._silence() if silent_s >= PATIENCE_S else "")
            if self.reason:
                break
        if self.reason and not self._ended.wait(LEAVE_S):
            self.stuck(self.reason)

    def _dead_process(self) -> str:
        dead: list[tuple[str, object]] = self._node.dead_processes() if self._node else []
        for kind, _ in dead:
            if kind in NEEDED:
                return f"Ray has ended: its {kind} process is gone"
        return ""

    def _head_answers(self) -> bool:
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=EVERY_S).close()
        except OSError:
            return False
        return True

    def _silence(self) -> str:
        return f"Ray is gone: its head at {self._head} does not answer"
