"""One picture of any mode and size to square RGB pixels, and many of them on all CPUs.

Every mode has a defined handling, named in ``changes`` so that it can be counted and reported.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

_ENDINGS = (
    "jpg", "jpeg", "jpe", "jfif", "png", "apng", "gif", "bmp", "dib", "webp", "tif", "tiff", "ppm", "pgm",
    "pbm", "pnm", "tga", "ico", "jp2", "avif",
)  # fmt: skip
ENDINGS = frozenset(f".{word}" for word in _ENDINGS)
# Only these parsers ever see a file: others start helper programs (EPS) or are no pictures (PDF).
_FORMATS = (
    "JPEG", "MPO", "PNG", "GIF", "BMP", "DIB", "WEBP", "TIFF", "PPM", "TGA", "ICO", "JPEG2000", "AVIF",
)  # fmt: skip
_DRAFT_SIZE = 4  # a JPEG is decoded at no less than this many times the wanted size: photos open 10x faster

Item = TypeVar("Item")
Result = TypeVar("Result")


class PictureError(Exception):
    """A file that gives no picture; the text is the reason in a few words."""


@dataclass(frozen=True)
class Picture:
    """``pixels`` uint8 (S, S, 3); ``changes`` what was done beside resizing, e.g. ("grey",)."""

    pixels: np.ndarray
    changes: tuple[str, ...]


def read_picture(file: Path, size: int) -> Picture:
    """Decode, turn by EXIF, convert to RGB, crop the centre square, resize to ``size`` × ``size``.

    Transparency is laid on white; of an animation or a file of many pages the first is taken.
    Raises PictureError with the reason.
    """
    try:
        with Image.open(file, formats=_known_formats()) as image:
            changes = ["first of many frames"] if _is_animated(image) else []
            image.draft(None, (size * _DRAFT_SIZE, size * _DRAFT_SIZE))
            image.load()
            turned, turn = _turn(image)
            changes += [turn] if turn else []
            rgb, kind = to_rgb(turned, image.format or "")
            return Picture(np.asarray(_square(rgb, size)), (*([kind] if kind else []), *changes))
    except PictureError:
        raise
    except Exception as error:  # Pillow's parsers raise nearly anything on damaged files
        raise PictureError(_reason(error)) from error


def read_exact(data: bytes, size: int) -> np.ndarray:
    """uint8 (S, S, 3) of a JPEG or PNG that must already be ``size`` × ``size``.

    Raises PictureError with the reason.
    """
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            if image.size != (size, size):
                raise PictureError(f"{image.width}×{image.height} pixels; expected {size}×{size}")
            return np.asarray(to_rgb(image, image.format or "")[0])
    except PictureError:
        raise
    except Exception as error:  # as above
        raise PictureError(_reason(error)) from error


def to_rgb(image: Image.Image, file_format: str = "") -> tuple[Image.Image, str]:
    """An RGB image, and the name of the conversion ("" when it was RGB already)."""
    if "transparency" in image.info or image.mode in ("RGBA", "RGBa", "LA", "La", "PA"):
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB"), "transparent"
    if image.mode == "RGB":
        return image, ""
    if image.mode.startswith("I") or image.mode == "F":
        return _narrow(image, file_format).convert("RGB"), "16-bit or float grey"
    kinds = {"L": "grey", "1": "grey", "P": "palette", "CMYK": "CMYK"}
    return image.convert("RGB"), kinds.get(image.mode, image.mode)


def _narrow(image: Image.Image, file_format: str) -> Image.Image:
    """Wide grey to 8 bits: of 16 bits the top byte; 32 bits and floats stretched from dark to bright."""
    values = np.asarray(image)
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format in ("PNG", "PPM")):
        return Image.fromarray((values.astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    values = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    return Image.fromarray(((values - low) * (255.0 / (high - low or 1.0))).round().astype(np.uint8))


def _turn(image: Image.Image) -> tuple[Image.Image, str]:
    """Upright by the EXIF orientation, and a word where that changed it or could not be read."""
    try:
        if image.getexif().get(0x0112, 1) in range(2, 9):
            return ImageOps.exif_transpose(image), "turned by EXIF"
    except Exception:  # the pixels are fine, only the tag block is damaged
        return image, "unreadable EXIF, not turned"
    return image, ""


def _is_animated(image: Image.Image) -> bool:
    """Whether more than one frame is there; the second picture of a phone's MPO file is not a frame."""
    try:
        animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
        if animated:
            image.seek(0)
        return animated
    except Exception:  # a damaged later frame does not matter: the first is what is used
        return False


def _square(image: Image.Image, size: int) -> Image.Image:
    width, height = image.size
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    # cropped first: with its box argument, resize would mix in pixels from outside the square
    square = image.crop((left, top, left + side, top + side))
    return square.resize((size, size), Image.Resampling.BICUBIC)


@functools.cache
def _known_formats() -> list[str]:
    """Those of ``_FORMATS`` that this Pillow has."""
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    if isinstance(error, PermissionError):
        return "no permission"
    if isinstance(error, Image.DecompressionBombError):
        return "too many pixels"
    return "cut short or corrupt"


def map_on_cpus(work: Callable[[Item], Result], items: Sequence[Item], chunk: int = 256) -> Iterator[Result]:
    """``map`` over threads, in order; Pillow leaves the interpreter lock while it decodes."""

    def run(start: int) -> list[Result]:
        return [work(item) for item in items[start : start + chunk]]

    with ThreadPoolExecutor(usable_cpus()) as pool:
        for results in pool.map(run, range(0, len(items), chunk)):
            yield from results


def usable_cpus() -> int:
    """CPUs this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
