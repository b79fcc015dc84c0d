"""Image data: found, decoded once per node into a cache, served as vectorised batches.

``resolve`` (what the user names → spec) → ``prepare`` (driver: decode, digest) → ``load`` (trial: mmap) →
``BatchStream`` (batches of flow matching on the training device).
"""

from tinydit_ray.data.batches import BatchStream, FlowBatch, to_pixels
from tinydit_ray.data.cache import cache_folder, load, prepare
from tinydit_ray.data.datasets import CachedCIFAR10, ImageFolderDataset, make_loader
from tinydit_ray.data.resolve import resolve
from tinydit_ray.data.shapes import draw_shapes
from tinydit_ray.data.spec import DataError, DataSpec, ImageSet, parse_classes

__all__ = [
    "BatchStream",
    "CachedCIFAR10",
    "DataError",
    "DataSpec",
    "FlowBatch",
    "ImageFolderDataset",
    "ImageSet",
    "cache_folder",
    "draw_shapes",
    "load",
    "make_loader",
    "parse_classes",
    "prepare",
    "resolve",
    "to_pixels",
]
