"""`regard curves`: the picture, the summary, and one-line errors for invalid logs."""

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from regard.translation.training.logs import _HEADER
from tests.cli.running import error_of, run


def test_nan_and_inf_are_skipped(tmp_path, capsys):
    rows = b"10,1,5,0.1,100,60,4,nan\n20,2,nan,0.1,100,120,inf,31.5\n30,3,2,0.1,100,,2,\n"
    (tmp_path / "log.csv").write_bytes(_HEADER + rows)
    run("curves", tmp_path, "-o", tmp_path / "x.svg")
    printed = capsys.readouterr().out
    assert "30 updates; best dev BLEU 31.50 at update 20, after 2.0 minutes" in printed
    assert "lowest dev loss 2.000 at update 30" in printed
    assert (tmp_path / "x.svg").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no rows yet"),
        (_HEADER, "no rows yet"),
        (b"step,loss\n1,2\n", "is not a training log: its first line must be step,epoch"),
        (_HEADER + b"1,x,,,,,,\n", "line 2: expected a number in each of 8 columns. Remove the line"),
        (_HEADER + b"1,,1e300,,,,,\n", "line 2"),
        (_HEADER + b"9" * 5000 + b",,,,,,,\n", "line 2"),
        (b"\xff\xfe\x00" * 99 + b"\n", "is not a training log"),
    ],
)
def test_an_invalid_log_is_reported_in_one_line(content, message, tmp_path, capsys):
    (tmp_path / "log.csv").write_bytes(content)
    assert message in error_of(capsys, "curves", tmp_path, "-o", tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
