"""Workers of one cell train as one: gradients, clipping, the fp16 scaler, and what they tell each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_rank import CLIP, STEPS

pytestmark = pytest.mark.slow

Ranks = dict[int, list[dict[str, Any]]]  # number of workers -> what each of them found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """One worker alone and two together, all at once."""
    folder = tmp_path_factory.mktemp("ranks")
    started = {size: [_start(folder, rank, size, port) for rank in range(size)] for size, port in _ports(1, 2).items()}
    for processes in started.values():
        for process in processes:
            assert process.wait(240) == 0
    return {size: [torch.load(folder / f"{size}-{rank}.pt") for rank in range(size)] for size in started}


def _ports(*sizes: int) -> dict[int, int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return dict.fromkeys(sizes, free.getsockname()[1])


def _start(folder: Path, rank: int, size: int, port: int) -> subprocess.Popen[bytes]:
    meeting = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "ddp_rank.py"), str(folder / f"{size}-{rank}.pt")],
        env={**os.environ, "OMP_NUM_THREADS": "1", **{key: str(value) for key, value in meeting.items()}},
    )


def norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([grad.flatten() for grad in gradients.values()]).norm())


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative L2 over all tensors."""
    apart = torch.cat([(a[name].double() - b[name].double()).flatten() for name in b]).norm()
    return float(apart / torch.cat([tensor.double().flatten() for tensor in b.values()]).norm())


def test_no_image_is_seen_twice_and_none_is_missed(ranks: Ranks) -> None:
    """Four batches of 16 are all 64 images once: sums of pixels tell the images apart (flips keep them)."""
    alone = torch.cat(ranks[1][0]["exchanges"]["batches"])
    shares = [torch.cat(found["exchanges"]["batches"]) for found in ranks[2]]
    assert len(shares[0]) == len(shares[1]) == 32
    whole = torch.cat(shares).sort().values
    assert len(whole.unique()) == 64
    torch.testing.assert_close(whole, alone.sort().values)


@pytest.mark.parametrize(("how", "tolerance"), [("plain", 1e-5), ("clipped", 1e-5), ("fp16", 5e-3)])
def test_two_workers_step_as_one_does(ranks: Ranks, how: str, tolerance: float) -> None:
    (one,), two = ([found[how] for found in ranks[size]] for size in (1, 2))
    for found in two:
        assert (found["steps"], found["skipped"]) == (one["steps"], one["skipped"]) == (STEPS, 0)
        assert distance(found["gradients"], one["gradients"]) < tolerance
        assert distance(found["weights"], one["weights"]) < tolerance
        assert found["loss"] == pytest.approx(one["loss"], rel=tolerance)  # of both shares, on each
    assert all(torch.equal(a, b) for a, b in zip(two[0]["weights"].values(), two[1]["weights"].values(), strict=True))


def test_the_averaged_gradient_is_clipped_after_it_is_unscaled(ranks: Ranks) -> None:
    """Clipped before they are averaged, two gradients that differ come out shorter; still scaled, far shorter."""
    for size in (1, 2):
        for found in ranks[size]:
            assert norm(found["plain"]["gradients"]) > 10 * CLIP
            assert norm(found["clipped"]["gradients"]) == pytest.approx(CLIP, rel=1e-3)
            assert norm(found["fp16"]["gradients"]) == pytest.approx(CLIP, rel=1e-3)


def test_an_overflow_on_one_worker_is_a_skipped_step_on_all(ranks: Ranks) -> None:
    for found in (*ranks[1], *ranks[2]):
        assert found["overflow"] == {"skipped": 1, "scale": 0.5, "untouched": True, "steps": 2}


def test_what_workers_tell_each_other(ranks: Ranks) -> None:
    for found in ranks[2]:
        told = {name: value for name, value in found["exchanges"].items() if name != "batches"}
        assert told == {
            "mean": 0.5, "highest": [1.0, 0.0], "objects": ["rank 0", "rank 1"], "whole": [0, 1], "first": 7,
            "agree": True,
        }  # fmt: skip
