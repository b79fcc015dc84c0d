"""Training: the plain trainer, and the fast one with switches."""

from tinydit_ray.train.fast import FastTrainer, compile_net, trainer_of
from tinydit_ray.train.trainer import Trainer, load_checkpoint

__all__ = ["FastTrainer", "Trainer", "compile_net", "load_checkpoint", "trainer_of"]
