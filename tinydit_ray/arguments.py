"""Types of command-line values: what each takes, and the words with which it refuses others."""

from __future__ import annotations

import argparse
import re
from typing import Any

from tinydit_ray.grid import parse_duration


def count(low: int) -> Any:
    """Argparse type: a whole number of at least ``low``."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return parse


def below_one(what: str) -> Any:
    """Argparse type: a number of at least 0 and below 1; ``what`` is what a value that is none is not."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def fraction(text: str) -> float:
    value = positive(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction below 1, such as 0.02 or 0.999")
    return value


def duration(text: str) -> float:
    """``90``, ``90s``, ``10m``, ``2h`` in seconds."""
    seconds = parse_duration(text)
    if seconds is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90s, 10m or 2h")
    return seconds
