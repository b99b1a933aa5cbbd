"""Run untrusted programs: `run.py` is the caller's side, `inside.py` and `asserts.py` start the programs."""
