"""``shapes``: a procedural set of 10 classes of textured 32×32 pictures, for use without data or network.

Each picture is one shape on a background: size, place, turn, stretch, colours, textures, an object in
front and noise all vary. Everything is integer arithmetic on a counter-based hash, so a picture depends
on (seed, split, index) alone and is the same on every machine, whatever its libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tinydit_ray.config import IMAGE_SIZE
from tinydit_ray.data.spec import SPLITS, Decoded, Listing, Source

CLASS_NAMES = (
    "disc", "square", "triangle", "ring", "cross", "star", "crescent", "bars", "corner", "hourglass",
)  # fmt: skip
COUNTS = {"train": 10_000, "test": 2_000}

Array = np.ndarray

_CHUNK = 256  # pictures drawn at once; their intermediate arrays stay in the CPU's cache
_FINE = 2 * IMAGE_SIZE  # outlines are drawn at twice the size and averaged
_UNIT = 256  # the length of a shape's radius in its own coordinates
_TURNS = 64
# cos and sin of the turns as integers: rounding hides the last-bit differences between maths libraries.
_COS = np.array([round(1024 * math.cos(2 * math.pi * k / _TURNS)) for k in range(_TURNS)], dtype=np.int32)
_SIN = np.array([round(1024 * math.sin(2 * math.pi * k / _TURNS)) for k in range(_TURNS)], dtype=np.int32)


def draw_shapes(count: int, *, seed: int = 0, split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` pictures uint8 (N, 3, 32, 32) and their labels int64 (N,), classes in equal shares."""
    images = np.empty((count, 3, IMAGE_SIZE, IMAGE_SIZE), dtype=np.uint8)
    labels = np.arange(count, dtype=np.int64) % len(CLASS_NAMES)
    for start in range(0, count, _CHUNK):
        rows = slice(start, min(start + _CHUNK, count))
        dice = _Dice(seed, split, np.arange(rows.start, rows.stop))
        images[rows] = _draw(dice, labels[rows])
    return torch.from_numpy(images), torch.from_numpy(labels)


class _Dice:
    """Random integers for N pictures, each drawn by name, so that a new one leaves the others as they are."""

    def __init__(self, seed: int, split: str, index: Array) -> None:
        start = np.uint32((seed * 2 + SPLITS.index(split)) & 0xFFFFFFFF)
        self.count = len(index)
        self._key = _mix(_mix(np.full(self.count, start, dtype=np.uint32)) ^ index.astype(np.uint32))

    def bits(self, name: str, *shape: int) -> Array:
        """uint32 (N, *shape)."""
        key = _mix(self._key ^ np.uint32(_name_hash(name)))
        places = np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B9)
        return _mix(key[:, None] + places).reshape(self.count, *shape)

    def range(self, name: str, low: int, high: int, *shape: int) -> Array:
        """int32 (N, *shape) from ``low`` to ``high`` - 1."""
        return ((self.bits(name, *shape) >> np.uint32(8)) % np.uint32(high - low)).astype(np.int32) + low


def _mix(x: Array) -> Array:
    """Chris Wellons' ``lowbias32``, a 32-bit integer hash (nullprogram.com/blog/2018/07/31)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _name_hash(name: str) -> int:
    """FNV-1a of a short word."""
    value = 0x811C9DC5
    for byte in name.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def _draw(dice: _Dice, labels: Array) -> Array:
    """uint8 (N, 3, 32, 32) of N pictures with the given classes."""
    colours = _colours(dice)
    picture = _blend(colours["back_a"], colours["back_b"], _texture(dice, "back"))
    shape = _blend(colours["front_a"], colours["front_b"], _texture(dice, "front"))
    cover = _cover(dice, labels)[:, None]
    picture = (picture * (4 - cover) + shape * cover) >> 2
    picture = np.where(_obstacle(dice)[:, None], colours["obstacle"][:, :, None, None], picture)
    strength = dice.range("noise strength", 4, 44)[:, None, None, None]
    noise = dice.range("noise", -128, 129, 3, IMAGE_SIZE, IMAGE_SIZE) * strength >> 7
    return (picture + noise).clip(0, 255).astype(np.uint8)


def _colours(dice: _Dice) -> dict[str, Array]:
    """Five colours int32 (N, 3). The shape's main colour is away from the background's main colour."""
    back = dice.range("back colour", 0, 256, 3)
    front = (back + dice.range("contrast", 56, 200, 3)) & 255
    return {
        "back_a": back,
        "back_b": (back + dice.range("back change", -70, 71, 3)).clip(0, 255),
        "front_a": front,
        "front_b": (front + dice.range("front change", -70, 71, 3)).clip(0, 255),
        "obstacle": dice.range("obstacle colour", 0, 256, 3),
    }


def _blend(a: Array, b: Array, field: Array) -> Array:
    """Colours (N, 3) mixed by a field (N, H, W) of 0..255: int32 (N, 3, H, W)."""
    a, b = a[:, :, None, None], b[:, :, None, None]
    return a + ((b - a) * field[:, None] >> 8)


def _texture(dice: _Dice, name: str) -> Array:
    """A field int32 (N, 32, 32) of 0..255: gradient, stripes, checks, clouds or grain."""
    axis = np.arange(IMAGE_SIZE, dtype=np.int32)
    y, x = axis[:, None], axis[None, :]
    turn = dice.range(f"{name} turn", 0, _TURNS)
    along = _COS[turn][:, None, None] * (x - 16) + _SIN[turn][:, None, None] * (y - 16)  # 1024 per pixel
    period = dice.range(f"{name} period", 3, 9)[:, None, None]
    phase = dice.range(f"{name} phase", 0, 64)[:, None, None]
    gradient = (along >> 8) + 128
    stripes = ((along >> 10) + phase) // period % 2 * 255
    checks = ((x + phase) // period + (y + phase) // period) % 2 * 255
    fields = [gradient, stripes, checks, _clouds(dice, name, 8), _clouds(dice, name, 4)]
    kind = dice.range(f"{name} kind", 0, len(fields))
    return np.stack(np.broadcast_arrays(*fields))[kind, np.arange(dice.count)].clip(0, 255)


def _clouds(dice: _Dice, name: str, cell: int) -> Array:
    """Random values on a lattice of ``cell`` pixels, bilinear between them: int32 (N, 32, 32)."""
    nodes = IMAGE_SIZE // cell + 1
    values = dice.range(f"{name} clouds {cell}", 0, 256, nodes, nodes)
    place = np.arange(IMAGE_SIZE)
    left, part = place // cell, (place % cell).astype(np.int32)
    rows = values[:, left] * (cell - part)[:, None] + values[:, left + 1] * part[:, None]
    return (rows[:, :, left] * (cell - part) + rows[:, :, left + 1] * part) // (cell * cell)


def _cover(dice: _Dice, labels: Array) -> Array:
    """How much of each pixel the shape covers, in quarters: int32 (N, 32, 32)."""
    axis = 2 * np.arange(_FINE, dtype=np.int32) + 1 - _FINE  # quarter pixels from the centre
    radius = dice.range("size", 30, 56)  # 7.5 to 14 pixels
    shift = dice.range("place", -20, 21, 2)
    x = axis[None, None, :] - shift[:, 0, None, None]
    y = axis[None, :, None] - shift[:, 1, None, None]
    turn = dice.range("turn", 0, _TURNS)
    stretch = dice.range("stretch", 200, 330)
    # the turn, the size and the stretch in one matrix, in 1/1024 of the shape's unit per quarter pixel
    scale_a, scale_b = _UNIT * 256 // stretch, _UNIT * stretch // 256
    a = _COS[turn] * scale_a // radius, _SIN[turn] * scale_a // radius
    b = -_SIN[turn] * scale_b // radius, _COS[turn] * scale_b // radius
    u = (a[0][:, None, None] * x + a[1][:, None, None] * y) >> 10
    v = (b[0][:, None, None] * x + b[1][:, None, None] * y) >> 10
    inside = np.zeros(u.shape, dtype=np.int32)
    for label, outline in enumerate(_OUTLINES):
        rows = labels == label
        inside[rows] = outline(u[rows], v[rows])
    return inside.reshape(len(labels), IMAGE_SIZE, 2, IMAGE_SIZE, 2).sum((2, 4), dtype=np.int32)


def _obstacle(dice: _Dice) -> Array:
    """Where a plain box hides the picture, in half of the pictures: bool (N, 32, 32)."""
    axis = np.arange(IMAGE_SIZE, dtype=np.int32)
    corner = dice.range("obstacle place", -2, IMAGE_SIZE - 4, 2)
    sides = dice.range("obstacle sides", 3, 11, 2)
    spans = (axis >= corner[..., None]) & (axis < (corner + sides)[..., None])
    present = dice.range("obstacle", 0, 2)[:, None, None] == 1
    return spans[:, 0, :, None] & spans[:, 1, None, :] & present


def _disc(u: Array, v: Array, radius: int) -> Array:
    return u * u + v * v < radius * radius


def _polygon(u: Array, v: Array, sides: int, distance: int) -> Array:
    """In how many of the half-planes of a regular polygon each point lies: int32."""
    count = np.zeros(u.shape, dtype=np.int32)
    for side in range(sides):
        angle = 2 * math.pi * side / sides
        count += u * round(256 * math.cos(angle)) + v * round(256 * math.sin(angle)) < distance * 256
    return count


def _bar(u: Array, v: Array, half_u: int, half_v: int) -> Array:
    return (np.abs(u) < half_u) & (np.abs(v) < half_v)


# Which points (u, v), in 1/256 of the radius, belong to the shape; in the order of CLASS_NAMES.
_OUTLINES: tuple[Callable[[Array, Array], Array], ...] = (
    lambda u, v: _disc(u, v, 235),
    lambda u, v: _bar(u, v, 205, 205),
    lambda u, v: _polygon(u, v, 3, 128) == 3,
    lambda u, v: _disc(u, v, 245) & ~_disc(u, v, 140),
    lambda u, v: _bar(u, v, 75, 245) | _bar(u, v, 245, 75),
    lambda u, v: _polygon(u, v, 5, 82) >= 4,  # a pentagram: inside all but one of its five lines
    lambda u, v: _disc(u, v, 245) & ~_disc(u - 110, v, 195),
    lambda u, v: _bar(u, np.abs(v) - 140, 230, 70),
    lambda u, v: _bar(u, v, 215, 215) & ~((u > -60) & (v > -60)),
    lambda u, v: (np.abs(u) < np.abs(v) + 20) & (np.abs(v) < 215),
)


def _no_files(root: Path) -> Listing:
    return Listing(())


def _draw_splits(root: Path, listing: Listing) -> dict[str, Decoded]:
    note = f"generated pictures of 10 shapes ({', '.join(CLASS_NAMES)}), not photographs"
    return {split: Decoded(*draw_shapes(count, split=split), (note,)) for split, count in COUNTS.items()}


SHAPES = Source("shapes", 1, _no_files, _draw_splits)
