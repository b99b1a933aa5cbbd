"""What a step of a run computes: the loop, and the parts that it calls."""
