"""A plain folder of images: which files it has, their labels, their split, and a count of what was done.

``root/*`` without labels, ``root/CLASS/*``, or either below ``root/train`` and ``root/test`` (or ``val``).
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import unicodedata
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tinydit_ray.config import IMAGE_SIZE
from tinydit_ray.data.pictures import ENDINGS, Picture, PictureError, map_on_cpus, read_picture
from tinydit_ray.data.spec import DataError, Decoded, Listing, Source, some_names

_TEST_NAMES = ("test", "val", "valid", "validation")
_TEST_SHARE = 10  # one image in ten is held out where the folder has no split of its own


def list_images(root: Path) -> Listing:
    """All files with an image's ending below ``root``, sorted by name, and the others with a reason.

    Links to folders are followed once per target, so that loops end; pipes and devices are never opened.
    """
    if not root.is_dir():
        raise DataError(f"image folder {root} does not exist on this machine")
    files: list[tuple[str, Path]] = []
    skipped: list[tuple[str, str]] = []
    for name, path, reason in _walk(root):
        if reason:
            skipped.append((name, reason))
        else:
            files.append((name, path))
    return Listing(tuple(sorted(files, key=lambda item: _sort_key(item[0]))), tuple(sorted(skipped)))


def _walk(root: Path) -> Iterator[tuple[str, Path, str]]:
    """(name, path, reason to skip or "") of every file; real folders before links to folders."""
    folders: deque[tuple[str, Path]] = deque([("", root)])
    links: deque[tuple[str, Path]] = deque()
    seen: set[tuple[int, int]] = set()
    while folders or links:
        prefix, folder = (folders or links).popleft()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            yield prefix or folder.name, folder, _os_reason(error)
            continue
        for entry in entries:
            name = f"{prefix}{entry.name}"
            kind, reason = _classify(entry)
            if kind == "folder":
                (links if entry.is_symlink() else folders).append((name + "/", Path(entry.path)))
            elif kind == "file":
                yield name, Path(entry.path), reason


def _classify(entry: os.DirEntry[str]) -> tuple[str, str]:
    """("folder" | "file" | "hidden folder", reason to skip it)."""
    try:
        mode = entry.stat().st_mode
    except OSError as error:
        return "file", _os_reason(error)
    hidden = entry.name.startswith(".")
    if stat.S_ISDIR(mode):
        return ("hidden folder" if hidden else "folder"), ""
    if not stat.S_ISREG(mode):
        return "file", "not a regular file"
    if hidden:
        return "file", "hidden"
    return "file", "" if os.path.splitext(entry.name)[1].lower() in ENDINGS else "no image ending"


def _os_reason(error: OSError) -> str:
    reasons = {errno.EACCES: "no permission", errno.ENOENT: "broken link", errno.ELOOP: "link loop"}
    return reasons.get(error.errno or 0, os.strerror(error.errno or 0))


def _sort_key(name: str) -> str:
    """One order on every machine, also where a file system stores accents apart from their letters."""
    return unicodedata.normalize("NFC", name)


class Candidate(NamedTuple):
    """An image file: the split its folder asks for ("" for none), its name within that split, its path."""

    split: str
    name: str
    path: Path


def decode_folder(root: Path, listing: Listing, size: int = IMAGE_SIZE) -> dict[str, Decoded]:
    """Decode all listed images into a train and a test split; a split without any image is DataError."""
    candidates = _candidates(listing)
    used, pictures, skipped = _read_all(candidates, size)
    split_given = any(item.split for item in candidates)
    if split_given:
        in_test = [item.split == "test" for item in used]
    else:
        in_test = _held_out([item.name for item in used])
    notes = _notes(listing, candidates, pictures, skipped, in_test)
    if len(set(in_test)) < 2:
        lack = {0: "no usable image", 1: "only one usable image"}.get(len(used))
        lack = lack or f"no usable image in its {'train' if all(in_test) else 'test'} folder"
        raise DataError(f"image folder {root}: {lack}; {'; '.join(notes)}")
    pixels, labels, test = stack_pictures(pictures), folder_labels(used), torch.tensor(in_test)
    return {
        "train": Decoded(pixels[~test], labels[~test], notes),
        "test": Decoded(pixels[test], labels[test], notes),
    }


def read_folder(root: Path, size: int) -> Decoded:
    """All images of a folder as one set, whatever its train and test folders, at ``size`` × ``size``."""
    listing = list_images(root)
    candidates = [Candidate("", name, path) for name, path in listing.files]
    used, pictures, skipped = _read_all(candidates, size)
    notes = _notes(listing, candidates, pictures, skipped, None)
    if not used:
        raise DataError(f"image folder {root}: no usable image; {'; '.join(notes)}")
    return Decoded(stack_pictures(pictures), folder_labels(used), notes)


def stack_pictures(pictures: Sequence[Picture]) -> torch.Tensor:
    """uint8 (N, 3, S, S) of N pictures."""
    pixels = torch.from_numpy(np.stack([picture.pixels for picture in pictures]))
    return pixels.permute(0, 3, 1, 2).contiguous()


def _candidates(listing: Listing) -> list[Candidate]:
    """The files with their splits where the folder has ``train`` and one of ``_TEST_NAMES``, else as one.

    A ``train`` folder that is all there is stands for the whole. Beside other folders but without a test
    folder it is taken for a class (of trains), so that no image is left out by a guess.
    """
    tops = {name.split("/")[0].lower() if "/" in name else "" for name, _ in listing.files}
    test_name = next((name for name in _TEST_NAMES if name in tops), "")
    if "train" not in tops or not (test_name or tops == {"train"}):
        return [Candidate("", name, path) for name, path in listing.files]
    candidates = []
    for name, path in listing.files:
        top, _, rest = name.partition("/")
        if rest and top.lower() == "train":
            candidates.append(Candidate("train" if test_name else "", rest, path))
        elif rest and top.lower() == test_name:
            candidates.append(Candidate("test", rest, path))
    return candidates


def _read_all(
    candidates: Sequence[Candidate], size: int
) -> tuple[list[Candidate], list[Picture], list[tuple[str, str]]]:
    """What could be decoded, its pictures, and (name, reason) of what could not."""

    def read(item: Candidate) -> Picture | str:
        try:
            return read_picture(item.path, size)
        except PictureError as error:
            return str(error)

    used, pictures, skipped = [], [], []
    for item, result in zip(candidates, map_on_cpus(read, candidates, chunk=16), strict=True):
        if isinstance(result, Picture):
            used.append(item)
            pictures.append(result)
        else:
            skipped.append((item.name, result))
    return used, pictures, skipped


def folder_labels(used: Sequence[Candidate]) -> torch.Tensor:
    """int64 (N,): the rank of each image's first subfolder among all of them, -1 for images outside any."""
    folders = [item.name.split("/")[0] if "/" in item.name else "" for item in used]
    ranks = {folder: rank for rank, folder in enumerate(sorted(set(folders) - {""}, key=_sort_key))}
    return torch.tensor([ranks.get(folder, -1) for folder in folders], dtype=torch.int64)


def _held_out(names: Sequence[str]) -> list[bool]:
    """One in ten, at least one: those whose names have the smallest hashes, so no clock or order decides."""

    def name_hash(name: str) -> bytes:
        return hashlib.sha256(_sort_key(name).encode(errors="surrogateescape")).digest()

    ranked = sorted(names, key=name_hash)
    count = max(1, round(len(names) / _TEST_SHARE)) if len(names) > 1 else 0
    test = set(ranked[:count])
    return [name in test for name in names]


def _notes(
    listing: Listing,
    candidates: Sequence[Candidate],
    pictures: Sequence[Picture],
    undecodable: Sequence[tuple[str, str]],
    in_test: Sequence[bool] | None,
) -> tuple[str, ...]:
    """``used 40 (36 train, 4 test), converted 3 (grey 2, CMYK 1), skipped 1 (not an image: a.png)``."""
    changed = [picture for picture in pictures if picture.changes]
    kinds = Counter(change for picture in changed for change in picture.changes)
    by_reason: dict[str, list[str]] = {}
    for name, reason in sorted([*listing.skipped, *undecodable]):
        by_reason.setdefault(reason, []).append(name)
    note = f"used {len(pictures)}"
    if in_test is not None:
        note += f" ({len(pictures) - sum(in_test)} train, {sum(in_test)} test)"
    note += f", converted {len(changed)}" + _in_brackets([f"{kind} {count}" for kind, count in kinds.items()])
    note += f", skipped {len(listing.skipped) + len(undecodable)}"
    note += _in_brackets([f"{reason}: {some_names(names)}" for reason, names in by_reason.items()], "; ")
    paths = {item.path for item in candidates}
    outside = [name for name, path in listing.files if path not in paths]
    if not outside:
        return (note,)
    return note, f"not used, being outside the train and test folders: {some_names(outside)}"


def _in_brackets(parts: Sequence[str], between: str = ", ") -> str:
    return f" ({between.join(parts)})" if parts else ""


FOLDER = Source("folder", 1, list_images, decode_folder)
