"""A package: a process that a test starts finds these modules even where an installed package is named `tests`."""
