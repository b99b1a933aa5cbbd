"""The process of a run on its machine: command line, signals, guard process, private directories.

`guard` is the parent of a run: it ends what a killed driver leaves and passes signals on. `keeper` waits for the end of
the owner of a directory `/tmp/hybridrl-*` and removes it with what was started in it. `forkserver` starts workers with
their imports done, and `stacks` writes where a silent process is.
"""

# Exit statuses of commands: it failed; its input is invalid; too many responses have no score; Ctrl-C; signal 9.
EXIT_FAILED, EXIT_REJECTED, EXIT_FAULTS, EXIT_INTERRUPTED, EXIT_KILLED = 1, 2, 3, 130, 137
