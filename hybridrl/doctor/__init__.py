"""The doctor: checks a run without starting it, tests resuming and rewards, and explains configuration keys.

One module per command (`__main__.py`); `check` without `--config-only` continues in `full.py`.
"""
