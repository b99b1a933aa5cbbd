"""`python -m hybridrl.doctor explain`."""


def main(argv: list[str]) -> int:
    raise NotImplementedError
