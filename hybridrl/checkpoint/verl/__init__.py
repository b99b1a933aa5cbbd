"""Checkpoints of verl's FSDP workers: model, optimizer and position, from any number of ranks, by one process."""

from hybridrl.checkpoint.verl.model import holds_verl, read_verl_model
from hybridrl.checkpoint.verl.read import DataPosition, VerlCheckpoint, read_verl

__all__ = ["DataPosition", "VerlCheckpoint", "holds_verl", "read_verl", "read_verl_model"]
