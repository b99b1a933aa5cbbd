"""Seeds of training's random numbers, each derived from the run's seed and from where in the run it is used."""


def training_seed(*keys: int) -> int:
    """Return the seed of the random numbers at a place of a run: of its seed and, for example, a step and a rank.

    Python hashes a tuple of integers to the same number in every process and, since 3.8, in every version of CPython
    on 64 bits. No document promises that, so a test holds three values: others would change what resumed runs sample.
    """
    return hash(keys) & 0x7FFFFFFF
