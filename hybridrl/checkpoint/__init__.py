"""Models on disk. Knows tensors, directories and renames; never how a model is trained."""
