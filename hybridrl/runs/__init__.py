"""Putting a run together: each entry point's preparation, start and restore.

`prepare` makes the inputs that need no device, for a run and for the doctor, and reports all rejections together.
`setup` runs any kind of training from start to end. `resume` continues a run, also after the death of a worker, or with
smaller micro-batches after an out-of-memory error.
"""
