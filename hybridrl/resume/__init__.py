"""What a run that goes on may change, what it is recognised by, and what it says of itself. Loads no state.

`choose` and `verl` are imported by name, as they bring torch with them.
"""

from hybridrl.resume.changes import Change, changes, decide
from hybridrl.resume.fingerprints import (
    code_fingerprint,
    data_fingerprint,
    fingerprint,
    model_fingerprint,
    sibling,
)
from hybridrl.resume.restored import what_was_restored

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
