"""The doctor: what can be known of a run without starting it, tests of one's own configuration, and help with its keys.

One file a command.
"""
