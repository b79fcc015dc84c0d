"""The cache of decoded data: one safetensors file per content, made once per node and read by mmap.

The file's name holds a fingerprint of the source's bytes, so a changed source is a new file. Its header
holds the digest of each split; every load compares the bytes it hands out with that digest (0.1 s for
CIFAR-10), so a cut or damaged file is found and made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tinydit_ray.atomic import remove_stale, replace_text, replacing
from tinydit_ray.data.cifar10 import CIFAR10, download_cifar10, has_cifar10
from tinydit_ray.data.folder import FOLDER
from tinydit_ray.data.parquet import PARQUET
from tinydit_ray.data.shapes import SHAPES
from tinydit_ray.data.spec import (
    DIGEST_LENGTH,
    SPLITS,
    DataError,
    DataSpec,
    Decoded,
    ImageSet,
    Listing,
    Source,
    Split,
    joint_digest,
    keep_classes,
    one_line,
    split_digest,
)

_KINDS: dict[str, Source] = {"cifar10": CIFAR10, "parquet": PARQUET, "folder": FOLDER, "shapes": SHAPES}
# A file changed less than this before it was hashed may change again within one tick of its clock.
_SETTLED_NS = 3_000_000_000


@dataclass(frozen=True)
class _Header:
    """What a cache file says of itself, as one JSON text, so that equal data give equal files."""

    name: str
    digests: dict[str, str]
    notes: dict[str, list[str]]


@dataclass(frozen=True)
class _Place:
    """Where decoded data belongs, and the source files as they were when that was found out."""

    path: Path
    listing: Listing
    state: str


def prepare(spec: DataSpec, cache_dir: Path | None = None) -> DataSpec:
    """Decode the data into the cache, unless it is there whole, and return ``spec`` with its digest.

    Safe when several processes start together: one decodes, the others wait. Raises DataError when the
    data cannot be used, or has another digest than a ``spec`` that already carries one.
    """
    place = _locate(spec, cache_dir)
    header = _verify(place.path) or _make(spec, place)
    _check_digest(spec, header)
    return replace(spec, digest=joint_digest(header.digests))


def load(spec: DataSpec, split: Split, cache_dir: Path | None = None) -> ImageSet:
    """One split from the cache, mapped into memory; decoded first where this node lacks it.

    Raises DataError when the data has another digest than ``spec``.
    """
    if split not in SPLITS:
        raise DataError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    place = _locate(spec, cache_dir)
    found = _read(place.path, split)
    if found is None:
        _make(spec, place)
        found = _read(place.path, split)
    if found is None:
        raise DataError(f"cache {place.path} is damaged again right after it was made; check the disk")
    header, images = found
    _check_digest(spec, header)
    return replace(images, source=_KINDS[spec.source].label)


def cache_folder(cache_dir: Path | None = None) -> Path:
    """``cache_dir``, else ``$TINYDIT_CACHE``, else ``~/.cache/tinydit_ray``; created when missing."""
    chosen = cache_dir or os.environ.get("TINYDIT_CACHE") or "~/.cache/tinydit_ray"
    folder = Path(chosen).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cache folder {folder} cannot be made ({error.strerror}); set TINYDIT_CACHE"
        ) from error
    return folder


def _check_digest(spec: DataSpec, header: _Header) -> None:
    found = joint_digest(header.digests)
    if spec.digest and spec.digest != found:
        raise DataError(
            f"data: {spec.root or spec.source} on this node holds other images (digest {found}) than those"
            f" asked for (digest {spec.digest}); give every node the same files"
        )


def _locate(spec: DataSpec, cache_dir: Path | None) -> _Place:
    """The cache file of this content, these classes and this decoder."""
    kind, root = _KINDS[spec.source], Path(spec.root)
    folder = cache_folder(cache_dir)
    if spec.source == "cifar10" and not has_cifar10(root):
        download_cifar10(root)
    listing = kind.listing(root)
    state, newest = _file_state(listing)
    content = _content_hash(spec, listing, state, newest, folder)
    key = _text_hash([content, list(spec.classes), kind.version])
    return _Place(folder / f"{kind.label}-{key}.safetensors", listing, state)


def _content_hash(spec: DataSpec, listing: Listing, state: str, newest: int, folder: Path) -> str:
    """Hash over the source files' names and bytes.

    It is remembered beside the cache together with the files' state, so that a trial need not read
    gigabytes to learn that nothing changed.
    """
    memo = folder / f"source-{_text_hash([spec.source, spec.root])}.json"
    try:
        remembered = json.loads(memo.read_text())
        if remembered["state"] == state:
            return str(remembered["content"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    settled = newest < time.time_ns() - _SETTLED_NS
    content = hashlib.sha256(repr(listing.skipped).encode(errors="surrogateescape"))
    for name, path in listing.files:
        content.update(name.encode(errors="surrogateescape") + b"\0" + _file_hash(path))
    if settled:
        _write_memo(memo, {"state": state, "content": content.hexdigest()})
    return content.hexdigest()


def _file_state(listing: Listing) -> tuple[str, int]:
    """Hash over each file's name, size, inode and times, and the newest time in ns.

    The change time is among them, since a copy can keep size and modification time of what it replaces.
    """
    newest, rows = 0, []
    for name, path in listing.files:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"data: {path} cannot be read ({error.strerror})") from error
        rows.append([name, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns])
        newest = max(newest, status.st_mtime_ns, status.st_ctime_ns)
    return _text_hash([rows, listing.skipped]), newest


def _file_hash(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:  # an unreadable image is skipped later, with this reason
        return f"unreadable {error.errno}".encode()


def _text_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:DIGEST_LENGTH]


def _write_memo(path: Path, value: dict[str, str]) -> None:
    """Best effort: without it the next process only hashes again."""
    with suppress(OSError):
        replace_text(path, json.dumps(value))


def _make(spec: DataSpec, place: _Place) -> _Header:
    """Decode into the cache file under a lock; whoever waited finds the file made."""
    try:
        with FileLock(place.path.with_suffix(".lock")):
            if found := _verify(place.path):
                return found
            return _write(place.path, _decode(spec, place))
    except (OSError, NotImplementedError) as error:
        raise DataError(
            f"cache {place.path} cannot be written ({one_line(error)}); set TINYDIT_CACHE to another folder"
        ) from error


def _decode(spec: DataSpec, place: _Place) -> dict[str, Decoded]:
    """Both splits, with the classes asked for; files that changed since they were hashed are DataError."""
    kind, root = _KINDS[spec.source], Path(spec.root)
    splits = kind.decode(root, place.listing)
    if _file_state(kind.listing(root))[0] != place.state:
        raise DataError(f"data: {root} changed while it was being read; try again when it is complete")
    where = spec.root or kind.label
    return {split: keep_classes(splits[split], spec.classes, f"{split} of {where}") for split in SPLITS}


def _write(path: Path, splits: dict[str, Decoded]) -> _Header:
    """The cache file and its header; the final name is always a whole file."""
    remove_stale(path)
    tensors = {}
    header = _Header(path.name, {}, {})
    for split, decoded in splits.items():
        tensors[f"{split}.images"] = decoded.images.contiguous()
        tensors[f"{split}.labels"] = decoded.labels.contiguous()
        header.digests[split] = split_digest(decoded.images, decoded.labels)
        header.notes[split] = list(decoded.notes)
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"header": json.dumps(asdict(header))})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return header


def _verify(path: Path) -> _Header | None:
    """The header of a cache file whose both splits are whole."""
    train, test = _read(path, "train"), _read(path, "test")
    return train[0] if train and test else None


def _read(path: Path, split: str) -> tuple[_Header, ImageSet] | None:
    """One split; None where the file is missing, cut, or holds other bytes than its header says."""
    try:
        with safe_open(path, framework="pt") as file:
            header = _Header(**json.loads((file.metadata() or {})["header"]))
            images, labels = file.get_tensor(f"{split}.images"), file.get_tensor(f"{split}.labels")
        digest = header.digests[split]
        if header.name != path.name or split_digest(images, labels) != digest:
            return None
        return header, ImageSet(images, labels, "", digest, tuple(header.notes[split]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
