"""Training batches: what they hold, that they repeat, that workers share them, and the tutorial's loader."""

import hashlib
import os
import statistics
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader

from tinydit_ray.data import BatchStream, DataError, FlowBatch, ImageSet, draw_shapes, make_loader, to_pixels
from tinydit_ray.data.datasets import PixelDataset


@pytest.fixture(scope="module")
def images():
    """uint8 (100, 3, 32, 32), each image recognisable by its first pixel and no two columns mirrored."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (100, 3, 32, 32), dtype=torch.uint8, generator=generator)
    pixels[:, 0, 0, 0] = pixels[:, 0, 0, 31] = torch.arange(100, dtype=torch.uint8)
    return pixels


def numbers(batch):
    """Which images a batch holds."""
    return ((batch.x0[:, 0, 0, 0] + 1) * 127.5).round().int().tolist()


def take(stream, count):
    return [next(stream) for _ in range(count)]


def fingerprint(stream):
    """Hash over the first three batches."""
    parts = [part.numpy().tobytes() for batch in take(stream, 3) for part in batch]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# --- contents ---


def test_shapes_types_and_ranges(images):
    batch = next(BatchStream(images, 16, seed=0))
    assert isinstance(batch, FlowBatch)
    assert batch.x0.shape == batch.noise.shape == (16, 3, 32, 32)
    assert batch.t.shape == (16,)
    assert {tensor.dtype for tensor in batch} == {torch.float32}
    assert batch.x0.min() >= -1
    assert batch.x0.max() <= 1
    assert 0 <= batch.t.min() <= batch.t.max() <= 1


def test_pixels_go_from_minus_one_to_one():
    pixels = to_pixels(torch.arange(256, dtype=torch.uint8))
    assert torch.allclose(pixels.double(), torch.arange(256).double() / 127.5 - 1, atol=1e-7)
    assert (pixels[0], pixels[255]) == (-1, 1)


def test_an_epoch_shows_each_image_once_and_drops_the_tail(images):
    stream = BatchStream(images, 32, seed=0)
    first, second = ([n for batch in take(stream, 3) for n in numbers(batch)] for _ in "12")
    assert stream.steps_per_epoch == 3
    for epoch in (first, second):
        assert len(set(epoch)) == 96
    assert first != second
    assert first != sorted(first)


def test_each_image_is_itself_or_its_mirror_and_half_are_mirrored(images):
    mirrored = 0
    for batch in take(BatchStream(images, 50, seed=3), 40):
        originals = to_pixels(images[numbers(batch)])
        flipped = (batch.x0 == originals.flip(-1)).flatten(1).all(1)
        assert ((batch.x0 == originals).flatten(1).all(1) ^ flipped).all()
        mirrored += int(flipped.sum())
    assert abs(mirrored - 1000) < 4 * (2000 * 0.25) ** 0.5


def test_without_flips_every_image_is_itself(images):
    for batch in take(BatchStream(images, 50, seed=3, flip=False), 4):
        assert torch.equal(batch.x0, to_pixels(images[numbers(batch)]))


@pytest.mark.slow
def test_noise_is_normal_and_times_uniform_and_none_repeat(images):
    batches = take(BatchStream(images, 100, seed=0), 30)
    noise = torch.cat([batch.noise for batch in batches]).double().flatten(1)
    count = noise.numel()
    assert abs(noise.mean()) < 5 / count**0.5
    assert abs(noise.var() - 1) < 5 * (2 / count) ** 0.5
    assert abs((noise**4).mean() - 3) < 5 * (96 / count) ** 0.5
    rows = noise / noise.norm(dim=1, keepdim=True)
    likeness = rows @ rows.T - torch.eye(len(rows), dtype=torch.float64)
    assert likeness.abs().max() < 0.15  # independent rows: about 0.018 x 5; a repeated one: 1
    times = torch.cat([batch.t for batch in batches]).double().sort().values
    expected = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
    assert (times - expected).abs().max() < 1.95 / 3000**0.5  # Kolmogorov-Smirnov at 0.1 %


# --- repeatable ---


def test_the_seed_alone_decides(images):
    one = take(BatchStream(images, 16, seed=5), 9)
    torch.manual_seed(99)
    torch.rand(7)
    state = torch.get_rng_state()
    two = take(BatchStream(images, 16, seed=5), 9)
    assert all(same(a, b) for a, b in zip(one, two, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    other = take(BatchStream(images, 16, seed=6), 9)
    assert not any(
        torch.equal(a.noise, b.noise) or torch.equal(a.t, b.t) for a, b in zip(one, other, strict=True)
    )
    assert [numbers(a) for a in one] != [numbers(b) for b in other]


@pytest.mark.slow
def test_batches_are_the_same_in_another_process_with_other_threads():
    code = (
        "import torch; torch.set_num_threads(2)\n"
        "from tinydit_ray.data import BatchStream, draw_shapes\n"
        "from test_data_batches import fingerprint\n"
        "print(fingerprint(BatchStream(draw_shapes(64)[0], 32, seed=-3)))\n"
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = fingerprint(BatchStream(draw_shapes(64)[0], 32, seed=-3))
    torch.set_num_threads(threads)
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == expected


@pytest.mark.parametrize("done", [0, 2, 6, 13])
def test_an_interrupted_stream_goes_on_with_the_same_batches(images, done):
    whole = take(BatchStream(images, 16, seed=0), 20)
    stream = BatchStream(images, 16, seed=0)
    take(stream, done)
    state = stream.state_dict()
    assert all(type(value) in (int, bool) for value in state.values())
    resumed = BatchStream(images, 16, seed=0)
    next(resumed)
    resumed.load_state_dict(state)
    assert all(same(a, b) for a, b in zip(take(resumed, 20 - done), whole[done:], strict=True))


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"batch_size": 8}, {"flip": False}, {"images": torch.zeros(64, 3, 32, 32).byte()}]
)
def test_a_state_of_another_stream_is_refused(images, change):
    settings = {"images": images, "batch_size": 16, "seed": 0, "flip": True}
    state = BatchStream(**settings).state_dict()
    with pytest.raises(DataError, match=next(iter(change))):
        BatchStream(**{**settings, **change}).load_state_dict(state)


# --- workers ---


@pytest.mark.parametrize(("batch_size", "workers"), [(32, 2), (24, 3), (30, 5), (100, 4), (7, 7), (16, 1)])
def test_the_shares_of_all_workers_are_the_batch_of_one(images, batch_size, workers):
    alone = BatchStream(images, batch_size, seed=2)
    shares = [
        BatchStream(images, batch_size, seed=2, rank=rank, world_size=workers) for rank in range(workers)
    ]
    for _ in range(2 * alone.steps_per_epoch + 1):
        parts = [next(share) for share in shares]
        assert {len(part.t) for part in parts} == {batch_size // workers}
        joined = [torch.cat([part[i] for part in parts]) for i in range(3)]
        assert same(joined, next(alone))


def test_a_state_may_go_on_with_another_number_of_workers(images):
    alone = BatchStream(images, 16, seed=0)
    take(alone, 3)
    second = BatchStream(images, 16, seed=0, rank=1, world_size=2)
    second.load_state_dict(alone.state_dict())
    assert torch.equal(next(second).x0, next(alone).x0[8:])


# --- refused ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 101}, "batch_size 101 is more than the 100 training images"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": 32, "world_size": 3}, "cannot be shared equally by 3 workers"),
        ({"batch_size": 32, "world_size": 2, "rank": 2}, "rank 2"),
        ({"batch_size": 8, "images": torch.zeros(9, 3, 32, 32)}, "expected uint8"),
    ],
)
def test_impossible_streams(images, settings, message):
    with pytest.raises(DataError, match=message):
        BatchStream(**{"images": images, "seed": 0, **settings})


# --- cost ---


def test_a_batch_is_cheap():
    """About 1.5 ms on a 2-core Zen 5; the bound leaves room for slower machines, not for a loop per image."""
    stream = BatchStream(draw_shapes(512)[0], 128, seed=0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(30):
            start = time.thread_time()
            next(stream)
            times.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    assert statistics.median(times) < 0.006


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_cuda_are_those_of_the_cpu(images):
    pairs = zip(*(take(BatchStream(images, 32, seed=0, device=d), 7) for d in ("cpu", "cuda")), strict=True)
    for cpu, cuda in pairs:
        assert {tensor.device.type for tensor in cuda} == {"cuda"}
        assert torch.equal(cpu.noise, cuda.noise.cpu())
        assert torch.equal(cpu.t, cuda.t.cpu())
        assert torch.allclose(cpu.x0, cuda.x0.cpu(), atol=1e-6)


# --- the tutorial's loader ---


def labelled(images, train=True):
    return PixelDataset(images, torch.arange(len(images)), train=train)


def test_the_loader_shuffles_flips_and_pairs_labels(images):
    loader = make_loader(labelled(images), batch_size=32)
    assert isinstance(loader, DataLoader)
    seen, mirrored = [], 0
    for pixels, labels in loader:
        assert pixels.shape == (32, 3, 32, 32)
        originals = to_pixels(images[labels])
        flipped = (pixels == originals.flip(-1)).flatten(1).all(1)
        assert ((pixels == originals).flatten(1).all(1) ^ flipped).all()
        mirrored += int(flipped.sum())
        seen += labels.tolist()
    assert len(loader) == 3
    assert len(set(seen)) == 96
    assert 20 < mirrored < 76
    assert seen != sorted(seen)


def test_test_data_come_in_order_with_their_tail(images):
    batches = list(make_loader(labelled(images, train=False), batch_size=32))
    assert [len(labels) for _, labels in batches] == [32, 32, 32, 4]
    assert torch.equal(torch.cat([pixels for pixels, _ in batches]), to_pixels(images))
    image_set = ImageSet(images, torch.arange(100), "shapes", "")
    assert len(list(make_loader(image_set, batch_size=32, train=False))) == 4


def test_worker_processes_are_used_and_change_nothing(images):
    loader = make_loader(labelled(images), batch_size=32, num_workers=2, seed=1)
    assert loader.num_workers == 2
    plain = make_loader(labelled(images), batch_size=32, seed=1)
    for _ in range(2):  # epochs
        epoch = list(zip(loader, plain, strict=True))
        assert len(epoch) == 3
        assert all(same(a, b) for a, b in epoch)


def test_manual_seed_decides_where_no_seed_is_given(images):
    def labels(seed):
        torch.manual_seed(seed)
        return [labels.tolist() for _, labels in make_loader(labelled(images), batch_size=32)]

    assert labels(1) == labels(1) != labels(2)


def test_a_training_set_that_fills_no_batch_is_refused(images):
    with pytest.raises(DataError, match="batch_size 128 is more than the 100"):
        make_loader(labelled(images), batch_size=128)
    with pytest.raises(DataError, match="batch_size 0"):
        make_loader(labelled(images), batch_size=0)
