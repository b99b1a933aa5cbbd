"""Rows of files, hub datasets or custom classes -> token ids, in a reproducible order."""
