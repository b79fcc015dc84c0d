"""What a mistake of a person's is told with."""

from __future__ import annotations


class OneLineError(ValueError):
    """A message of one line, whatever line breaks and control characters are in what it quotes: they are escaped."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))
