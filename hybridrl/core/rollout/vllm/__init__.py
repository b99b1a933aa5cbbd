"""The vLLM rollout engine; the only package that imports vLLM for rollout."""
