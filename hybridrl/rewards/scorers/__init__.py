"""The scorers that come along, one file a kind of answer. None runs or evaluates an answer outside of `sandbox.py`."""
