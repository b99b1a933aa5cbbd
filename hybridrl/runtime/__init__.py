"""The process of a run on its machine: command line, signals, guard process, private directories."""
