"""New weights from trainer to engine on one device. Knows names, types, shapes and handles; no model, no engine.

Trainers gather the model bucket by bucket in memory that the engine of the same device opens by handle (CUDA IPC, or an
anonymous file on CPU). One bucket is filled while the other is read. `BroadcastSync` sends buckets to other devices. A
sync has three checks: the digest of every bucket, each engine's id of its last sync, and log-probs of a probe, which
must equal the trainers' up to rounding. If a check fails, the run stops.
"""
