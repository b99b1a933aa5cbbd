"""`python -m hybridrl.doctor keys`."""


def main(argv: list[str]) -> int:
    raise NotImplementedError
