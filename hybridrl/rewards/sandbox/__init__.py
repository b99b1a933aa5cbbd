"""Running a stranger's program: `run.py` is the caller's side, `inside.py` what the program runs in."""
