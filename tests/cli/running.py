"""Commands, run in this process."""

import pytest

from regard.cli import main


def run(*arguments: object, status: int = 0) -> None:
    """Run a command, which must leave with this exit status."""
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    assert (left.value.code or 0) == status
