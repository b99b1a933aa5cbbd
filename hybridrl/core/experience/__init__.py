"""Experience: what a training step learns from, and the files that keep its samples."""
