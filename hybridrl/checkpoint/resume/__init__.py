"""Resuming: which checkpoint, what may change in the configuration, and how runs are identified. Loads no state."""

from hybridrl.checkpoint.resume.fingerprints import code_fingerprint, data_fingerprint, fingerprint, model_fingerprint
from hybridrl.checkpoint.resume.summary import resume_summary

__all__ = ["code_fingerprint", "data_fingerprint", "fingerprint", "model_fingerprint", "resume_summary"]
