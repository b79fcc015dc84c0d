"""Exit statuses, and the error that a user can cause."""

OK, BAD_CELL, USAGE, INTERRUPTED = 0, 3, 2, 130


class UsageError(ValueError):
    """What a person asked for cannot be done; one line, exit status 2, before any trial."""
