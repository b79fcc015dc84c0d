"""TinyDiT and its parts. Knows nothing of training, data or sweeps."""

from tinydit_ray.model.attention import MultiHeadAttention, attention
from tinydit_ray.model.blocks import DiTBlock, FeedForward, FinalLayer, modulate
from tinydit_ray.model.dit import TinyDiT, TinyDiTConfig, build_model
from tinydit_ray.model.embeddings import PatchEmbed, PosEmbed2D, TimestepEmbedding, sinusoidal_embedding, unpatchify

__all__ = [
    "DiTBlock", "FeedForward", "FinalLayer", "MultiHeadAttention", "PatchEmbed", "PosEmbed2D",
    "TimestepEmbedding", "TinyDiT", "TinyDiTConfig", "attention", "build_model", "modulate",
    "sinusoidal_embedding", "unpatchify",
]  # fmt: skip
