"""New weights from trainer to engine on one device. Knows names, types, shapes and handles; no model, no engine.

Trainers gather the model bucket by bucket into memory that the engine of the same device opens by handle (CUDA IPC, or
an anonymous file on CPU), one bucket being filled while the other is read; `BroadcastSync` sends them to other devices.
A sync is proven three times: digests of every bucket, the number of the sync that each engine holds, and log-probs of a
probe, which must equal the trainers' up to rounding. Otherwise the run stops.
"""
