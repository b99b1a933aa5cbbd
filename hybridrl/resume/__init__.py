"""What a run that goes on may change, what it is recognised by, and what it says of itself. Loads no state."""

from hybridrl.resume.changes import Change, changes, decide
from hybridrl.resume.choose import agree, saved_step
from hybridrl.resume.fingerprints import code_fingerprint, data_fingerprint, fingerprint, sibling
from hybridrl.resume.restored import what_was_restored

__all__ = [
    "Change",
    "agree",
    "changes",
    "code_fingerprint",
    "data_fingerprint",
    "decide",
    "fingerprint",
    "saved_step",
    "sibling",
    "what_was_restored",
]
