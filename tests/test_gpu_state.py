"""What nvidia-smi says of other processes and throttling; a small program of that name stands in for a GPU's."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from tinydit_ray.bench import gpu
from tinydit_ray.bench.gpu import (
    THROTTLE_REASONS,
    GpuState,
    foreign_processes,
    gpu_state,
    throttle_words,
    watch_gpu,
)

GPU = "GPU-0a1b"


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_processes_and_counters_of_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(
        tmp_path, monkeypatch,
        'case "$*" in\n'
        f'  *--id={GPU}*--query-compute-apps=pid*) printf "4711\\n4712\\n";;\n'
        f'  *--id={GPU}*clocks_event_reasons_counters*) echo "100, 200, 0, 0, 0";;\n'
        "  *) exit 1;;\nesac",
    )  # fmt: skip
    state = gpu_state(GPU)
    assert state.processes == 2
    assert state.throttled_us == dict(zip(THROTTLE_REASONS, (100, 200, 0, 0, 0), strict=True))


@pytest.mark.parametrize(
    "body", ["exit 9", 'echo "Field is not a valid field to query."; exit 2', "printf ''", 'echo "[N/A], [N/A]"']
)
def test_a_driver_that_does_not_say_leaves_the_columns_empty(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, monkeypatch, body)
    state = gpu_state(GPU)
    assert state == GpuState()
    assert foreign_processes(state, state) is None
    assert throttle_words(state, state, 1.0) is None


def test_without_nvidia_smi_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_state(GPU) == GpuState()


def test_others_on_the_gpu_are_those_beside_this_process() -> None:
    assert foreign_processes(GpuState(1), GpuState(1)) == 0
    assert foreign_processes(GpuState(1), GpuState(3)) == 2
    assert foreign_processes(GpuState(2), GpuState()) == 1


def test_throttling_is_named_with_its_share_of_the_window() -> None:
    before = GpuState(1, {"sw_power_cap": 1_000_000, "hw_slowdown": 5})
    quarter, little = ({"sw_power_cap": us, "hw_slowdown": 5} for us in (3_500_000, 1_050_000))
    assert throttle_words(before, GpuState(1, quarter), 10.0) == "sw_power_cap 25 %"
    assert throttle_words(before, GpuState(1, little), 10.0) == "none"


def test_a_cpu_cell_asks_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, f"touch {tmp_path}/asked")
    with watch_gpu("cpu") as window:
        pass
    assert (window.foreign_processes, window.throttle, window.flags) == (None, None, [])
    assert not (tmp_path / "asked").exists()


def test_a_window_on_cuda_reads_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = tmp_path / "counter"
    nvidia_smi(
        tmp_path, monkeypatch,
        'case "$*" in\n'
        '  *query-compute-apps*) printf "1\\n2\\n";;\n'
        f"  *) n=$(cat {counter} 2>/dev/null || echo 0); echo $((n + 10000000)) > {counter};\n"
        '     echo "$n, 0, 0, 0, 0";;\n'
        "esac",
    )  # fmt: skip
    monkeypatch.setattr(gpu, "current_gpu", lambda: GPU)
    with watch_gpu("cuda") as window:
        time.sleep(0.01)
    assert window.foreign_processes == 1
    assert window.throttle is not None
    assert window.throttle.startswith("sw_power_cap")
    assert window.flags == ["foreign-gpu", "throttled"]
