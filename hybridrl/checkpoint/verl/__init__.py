"""Checkpoints of verl's FSDP workers: model, optimizer and data position, saved by any number of ranks."""
