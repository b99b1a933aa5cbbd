"""The core: the loop, and the parts that a step of a run calls."""
