"""Built-in scorers, one file per family. None runs or evaluates text of a response outside the sandbox."""
