"""The SGLang rollout engine; the only package that imports SGLang."""
