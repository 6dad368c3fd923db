"""Run commands in this process."""

import pytest

from regard.cli import main


def run(*arguments: object, status: int = 0) -> None:
    """Run a command and check its exit status."""
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    assert (exit.value.code or 0) == status
