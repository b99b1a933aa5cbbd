"""The process of a run on its machine: command line, signals, guard process, private directories."""

# Exit statuses of commands: it failed; its input is invalid; too many responses have no score; Ctrl-C; signal 9.
EXIT_FAILED, EXIT_REJECTED, EXIT_FAULTS, EXIT_INTERRUPTED, EXIT_KILLED = 1, 2, 3, 130, 137
