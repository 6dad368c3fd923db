"""Run commands in this process."""

import pytest

from regard.cli import main


def run(*arguments: object, status: int = 0) -> None:
    """Run a command and check its exit status."""
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    assert (exit.value.code or 0) == status


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must fail with one line on stderr; return the line."""
    capsys.readouterr()
    run(*arguments, status=2)
    captured = capsys.readouterr()
    assert captured.out == "" or arguments[0] == "look"  # look prints the models it loads
    assert captured.err.startswith("regard: ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err
