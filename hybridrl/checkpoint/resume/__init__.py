"""What a run that goes on may change, what it is recognised by, and what it says of itself. Loads no state.

`choose` and `verl` are imported by name, as they bring torch with them.
"""

from hybridrl.checkpoint.resume.config_diff import Change, changes, decide
from hybridrl.checkpoint.resume.fingerprints import (
    code_fingerprint,
    data_fingerprint,
    fingerprint,
    model_fingerprint,
    sibling,
)
from hybridrl.checkpoint.resume.summary import what_was_restored

__all__ = [
    "Change",
    "changes",
    "code_fingerprint",
    "data_fingerprint",
    "decide",
    "fingerprint",
    "model_fingerprint",
    "sibling",
    "what_was_restored",
]
