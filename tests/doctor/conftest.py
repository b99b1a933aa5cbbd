from collections.abc import Callable

import pytest

from hybridrl.doctor.__main__ import main

Doctor = Callable[..., tuple[int, str]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Run the command; its exit status and what it prints."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words: str) -> tuple[int, str]:
        try:
            status = main(list(words))
        except SystemExit as usage:
            status = int(str(usage.code))
        told = capsys.readouterr()
        return status, told.out + told.err

    return run
