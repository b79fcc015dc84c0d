"""Where trained weights go: a folder (a mounted share among them) or s3://bucket/prefix, through pyarrow's filesystems.

Files are there whole or not at all: in a folder they are written beside and renamed, an object of S3 appears when its
upload is complete. Knows nothing of sweeps.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tinydit_ray.atomic import replacing


class StorageError(ValueError):
    """A storage cannot be used as asked. One line for the user."""


@dataclass(frozen=True)
class Storage:
    """A place for files by name. ``uri`` is absolute: file:///… or s3://…, options in its query."""

    uri: str

    @classmethod
    def at(cls, text: str) -> Storage:
        """The storage that a person names: a folder, or s3://bucket/prefix. Raises StorageError."""
        parts = urlsplit(text)
        if "://" not in text:
            return cls(Path(text).expanduser().absolute().as_uri())
        if parts.scheme == "file" and parts.path:
            return cls(text.rstrip("/"))
        if parts.scheme != "s3" or not parts.netloc:
            raise StorageError(f"{text!r} is neither a folder nor s3://bucket/prefix")
        if "@" in parts.netloc:
            raise StorageError("credentials in the URI would be recorded; give them by AWS_ACCESS_KEY_ID and the like")
        return cls(text)

    def child(self, name: str) -> str:
        """The URI of a file by its name, which may have slashes."""
        base, _, query = self.uri.partition("?")
        return f"{base.rstrip('/')}/{name}" + (f"?{query}" if query else "")

    def check(self) -> None:
        """Write and remove a small file. Raises StorageError where that cannot be."""
        name = f".check-{uuid.uuid4().hex}"
        self.write(name, b"written by a sweep that starts\n")
        system, path = _system(self.child(name))
        try:
            system.delete_file(path)
        except OSError as error:
            raise StorageError(_line(error)) from None

    def write(self, name: str, content: bytes) -> str:
        """Write a file and return its URI. Raises StorageError."""
        uri = self.child(name)
        try:
            if uri.startswith("file:"):
                _write_beside(_local_path(uri), content)
            else:
                system, path = _system(uri)
                with system.open_output_stream(path) as stream:
                    stream.write(content)
        except OSError as error:
            raise StorageError(_line(error)) from None
        return uri


    def find(self, name: str) -> bytes | None:
        """A file by its name; None where there is none. Raises StorageError where the storage cannot be asked."""
        from pyarrow import fs

        uri = self.child(name)
        system, path = _system(uri)
        try:
            if system.get_file_info(path).type == fs.FileType.NotFound:
                return None
        except OSError as error:
            raise StorageError(_line(error)) from None
        return read(uri)


def read(uri: str) -> bytes:
    """A file of a storage by its URI, as a record names it. Raises StorageError."""
    try:
        system, path = _system(uri)
        with system.open_input_stream(path) as stream:
            return stream.read()
    except OSError as error:
        raise StorageError(_line(error)) from None


def _write_beside(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def _local_path(uri: str) -> Path:
    from urllib.parse import unquote

    return Path(unquote(urlsplit(uri).path))


def _system(uri: str) -> tuple[Any, str]:
    """pyarrow's filesystem of a URI, and the path in it. Raises StorageError."""
    from pyarrow import fs

    try:
        if uri.startswith("file:"):
            return fs.LocalFileSystem(), str(_local_path(uri))
        return fs.FileSystem.from_uri(uri)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise StorageError(_line(error)) from None


def _line(error: BaseException) -> str:
    """An error in one line; S3's own tells request ids over several."""
    text = getattr(error, "strerror", None) or str(error)
    filename = getattr(error, "filename", None)
    return " ".join(f"{text}{f': {filename}' if filename else ''}".split())[:300]
