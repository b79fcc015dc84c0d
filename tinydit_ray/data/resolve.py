"""From what the user names (``--data``, ``$TINYDIT_DATA``) to a ``DataSpec``, and why that one was chosen."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tinydit_ray.config import nearest
from tinydit_ray.data.cifar10 import download_cifar10, has_cifar10
from tinydit_ray.data.folder import list_images
from tinydit_ray.data.parquet import parquet_folder
from tinydit_ray.data.spec import CIFAR10_FOLDER, DataError, DataSpec, check_classes

WORDS = ("auto", "cifar10", "shapes")
VARIABLE = "TINYDIT_DATA"

_LAYOUT_NAMES = {
    "cifar10": "CIFAR-10 in torchvision's layout",
    "parquet": "CIFAR-10 in the parquet layout",
    "folder": "an image folder",
}


def resolve(
    data: str | Path = "auto",
    classes: Sequence[int] = (),
    env: Mapping[str, str] = os.environ,
    cwd: Path = Path("."),
) -> tuple[DataSpec, str]:
    """The data set that ``data`` names, and one sentence that says why it was chosen.

    ``data`` is auto, cifar10, shapes, or a folder: parquet layout, torchvision layout or images.
    ``auto`` takes ``$TINYDIT_DATA``, else ``./data``, else downloads CIFAR-10 to ``./data``, else falls
    back to ``shapes``. ``cifar10`` takes CIFAR-10 at the same places or downloads it. Nothing is decoded.
    Raises DataError.
    """
    chosen, name = check_classes(classes), str(data)
    if name == "shapes":
        return _ten_classes("shapes", "", chosen), "data: shapes, as asked (generated, nothing to download)"
    if name not in WORDS:
        return _named_folder(name, chosen, cwd)
    found = _from_variable(name, chosen, env, cwd) or _from_data_folder(name, chosen, cwd)
    return found or _downloaded(name, chosen, cwd)


def spec_at(root: Path, classes: Sequence[int] = ()) -> DataSpec:
    """The spec of the data at ``root``, its layout detected. Raises DataError when there is none."""
    if not root.is_dir():
        raise DataError(f"{root} is {'not a folder' if root.exists() else 'missing'}")
    if root.name == CIFAR10_FOLDER and has_cifar10(root.parent):
        root = root.parent
    if has_cifar10(root):
        return _ten_classes("cifar10", str(root), check_classes(classes))
    if parquet_folder(root):
        return DataSpec(source="parquet", root=str(root), classes=tuple(classes))
    if list_images(root).files:
        return DataSpec(source="folder", root=str(root), classes=tuple(classes))
    raise DataError(f"{root} holds no train*.parquet, no {CIFAR10_FOLDER}/ and no image files")


def _ten_classes(source: str, root: str, classes: tuple[int, ...]) -> DataSpec:
    """A source whose labels are known to be 0 to 9."""
    if classes and classes[-1] > 9:
        raise DataError(f"classes: {classes[-1]} is not in {source}; its labels are 0 to 9")
    return DataSpec(source=source, root=root, classes=classes)


def _absolute(path: str, cwd: Path) -> Path:
    return Path(os.path.abspath(cwd / Path(path).expanduser()))


def _named_folder(name: str, classes: tuple[int, ...], cwd: Path) -> tuple[DataSpec, str]:
    root = _absolute(name, cwd)
    if not name or not root.exists():
        raise DataError(
            f"data: {name!r} is neither {', '.join(WORDS)} nor an existing folder{nearest(name, WORDS)}"
        )
    try:
        spec = spec_at(root, classes)
    except DataError as error:
        raise DataError(f"data: {error}") from error
    return spec, f"data: {_LAYOUT_NAMES[spec.source]} at {root}, as asked"


def _from_variable(
    word: str, classes: tuple[int, ...], env: Mapping[str, str], cwd: Path
) -> tuple[DataSpec, str] | None:
    """What ``$TINYDIT_DATA`` names; set but unusable is an error, never a reason to take something else."""
    value = env.get(VARIABLE, "")
    if not value:
        return None
    try:
        spec = spec_at(_absolute(value, cwd), classes)
    except DataError as error:
        raise DataError(f"{VARIABLE}={value} cannot be used: {error}") from error
    if word == "cifar10" and spec.source == "folder":
        raise DataError(f"data: cifar10 was asked for, but {VARIABLE}={value} is an image folder; unset it")
    return spec, f"data: {word} takes {_LAYOUT_NAMES[spec.source]} at {spec.root}, named by {VARIABLE}"


def _from_data_folder(word: str, classes: tuple[int, ...], cwd: Path) -> tuple[DataSpec, str] | None:
    root = _absolute("data", cwd)
    if not root.is_dir():
        return None
    try:
        spec = spec_at(root, classes)
    except DataError:
        if has_cifar10(root) or parquet_folder(root):
            raise  # the layout is there, so what is wrong is what was asked of it
        return None
    if word == "cifar10" and spec.source == "folder":
        return None
    return spec, f"data: {word} takes {_LAYOUT_NAMES[spec.source]} found at {spec.root}"


def _downloaded(word: str, classes: tuple[int, ...], cwd: Path) -> tuple[DataSpec, str]:
    """A fresh download, or for ``auto`` the generated set when there is none to be had."""
    root = _absolute("data", cwd)
    spec = _ten_classes("cifar10", str(root), classes)
    try:
        download_cifar10(root)
    except DataError as error:
        if word == "cifar10":
            raise DataError(
                f"data: {error}; give --data PATH, set {VARIABLE}, or use --data shapes"
            ) from error
        return _ten_classes("shapes", "", classes), (
            f"data: WARNING: auto falls back to shapes, a GENERATED set whose scores are not CIFAR-10's,"
            f" because {VARIABLE} is not set, {root} holds no data, and the download failed: {error}"
        )
    return spec, f"data: {word} downloaded CIFAR-10 to {root}"
