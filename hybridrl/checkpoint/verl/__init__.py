"""Checkpoints of verl's FSDP workers: model, optimizer and position, on any number of ranks, from any number."""

from hybridrl.checkpoint.verl.model import holds_verl, read_verl_model
from hybridrl.checkpoint.verl.reader import VerlReader
from hybridrl.checkpoint.verl.step import DataPosition, data_position, verl_faults

__all__ = ["DataPosition", "VerlReader", "data_position", "holds_verl", "read_verl_model", "verl_faults"]
