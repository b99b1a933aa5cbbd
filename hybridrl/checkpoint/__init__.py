"""Checkpoints on disk: publishing them atomically, reading them safely, and resuming from them.

Ranks copy their state into host memory, the only wait, and write it in the background. The driver adds the state of
its parts and publishes all of it by one rename once every rank has written, with a checksum of each file. A checkpoint
does not depend on the number of ranks, and nothing that its files name is called.
"""
