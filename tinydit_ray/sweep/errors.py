"""Exit statuses, and the errors that end a sweep in one line."""

from tinydit_ray.errors import OneLineError

OK, BAD_CELL, USAGE, INTERRUPTED = 0, 3, 2, 130


class UsageError(OneLineError):
    """What a person asked for cannot be done; one line, exit status 2, before any trial."""


class ExecutorLost(RuntimeError):
    """What runs the trials is gone (Ray's own processes died); the message says what was seen."""


class SweepBroken(RuntimeError):
    """A running sweep cannot go on (disk full, Ray gone). What is recorded stays; one line, exit status 3."""
