"""Putting a run together: what each entry point prepares, starts and restores.

`prepare` does what needs no device, with all rejections at once, for a run and for the doctor; `setup` runs from start
to end, whatever is trained; `resume` continues a run, also after a worker died, or with smaller micro-batches after
an out-of-memory error. `plugins` names what a run calls without importing it.
"""
