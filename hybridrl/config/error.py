"""The one error for everything that a user can mend in a command, a file or a data set."""


class ConfigError(ValueError):
    """A refusal whose message names the key or file, its value, and the way out; shown without a traceback."""
