"""Checkpoints on disk: publishing them atomically, reading them safely, and resuming from them."""
