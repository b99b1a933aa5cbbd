"""`python -m hybridrl.doctor migrate`."""


def main(argv: list[str]) -> int:
    raise NotImplementedError
