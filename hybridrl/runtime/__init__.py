"""What surrounds a run on this machine: the command line, signals, the guard process, private directories, timers."""
