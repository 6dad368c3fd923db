"""Curves: values, layout and errors; and `regard curves`."""

from itertools import combinations

import pytest
import torch

from regard.errors import ArgumentError
from regard.models.encoders.base import Comparison
from regard.plot.curves import draw_by_distance, draw_by_length, draw_comparison, draw_curves
from regard.translation.evaluation import LengthBucket, LengthRange
from regard.translation.training.callbacks import Report, ValidationResult
from regard.translation.training.logs import CsvLog, LogRow

PNG = b"\x89PNG\r\n\x1a\n"


def rows(steps: int = 40, best: int = 30, validated: bool = True) -> list[LogRow]:
    """Return the log of a model that overfits after its best step."""
    return [
        LogRow(
            step,
            loss=9 / step,
            seconds=step * 30.0,
            dev_loss=10 / step if validated and step % 5 == 0 else None,
            dev_bleu=30.0 - abs(step - best) if validated and step % 5 == 0 else None,
        )
        for step in range(1, steps + 1)
    ]


def names(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_axes_start_at_0_even_for_a_single_point(tmp_path, figures):
    draw_curves(
        {"short": [LogRow(20, loss=5.0, seconds=9.0, dev_loss=5.0, dev_bleu=0.02)]}, tmp_path / "x.png"
    )
    (_, _, bleu, minutes) = figures[0].axes
    assert bleu.get_xlim()[0] == minutes.get_xlim()[0] == bleu.get_ylim()[0] == 0
    assert bleu.get_ylim()[1] >= 1


def test_losses_and_bleu_over_updates_and_minutes(tmp_path, figures):
    draw_curves({"small": rows(), "large": rows(60)}, tmp_path / "curves.png")
    (figure,) = figures
    losses, losses_in_time, bleu, bleu_in_time = figure.axes
    assert [axes.get_xlabel() for axes in (bleu, bleu_in_time)] == ["updates", "minutes of training"]
    assert [axes.get_ylabel() for axes in (losses, bleu)] == ["loss per token", "validation BLEU"]
    assert names(figure) == ["small", "large"]
    dev = [line for line in bleu.get_lines() if len(line.get_xdata()) > 1]
    assert [list(line.get_xdata()) for line in dev] == [list(range(5, 41, 5)), list(range(5, 61, 5))]
    assert max(losses_in_time.get_lines()[-1].get_xdata()) == 30  # minutes of 60 steps
    assert [text.get_text() for text in bleu.texts] == ["30.0", "30.0"]  # the best BLEU of each


def test_without_validation_only_losses_are_drawn(tmp_path, figures):
    draw_curves({"small": rows(validated=False)}, tmp_path / "curves.svg")
    assert len(figures[0].axes) == 2


def test_rows_without_a_time_are_drawn_over_updates_only(tmp_path):
    draw_curves(
        {"small": [LogRow(1, dev_bleu=1.0), LogRow(2, loss=3.0, seconds=60, dev_bleu=2.0)]},
        tmp_path / "x.pdf",
    )
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")


def test_one_row_and_nonfinite_losses(tmp_path):
    draw_curves(
        {"one": [LogRow(1, loss=float("nan"), seconds=1.0, dev_loss=float("inf"))]}, tmp_path / "x.png"
    )


@pytest.mark.parametrize("count", [1, 3, 9])
def test_nothing_overlaps(count, tmp_path, figures):
    draw_curves({f"model {i} " + "x" * i: rows(best=5 * i + 5) for i in range(count)}, tmp_path / "x.png")
    (figure,) = figures
    figure.canvas.draw()
    legends = [legend.get_window_extent() for legend in figure.legends]
    assert len(legends) == 2
    assert not any(axes.get_legend() for axes in figure.axes)
    boxes = [*legends, *(axes.get_tightbbox() for axes in figure.axes)]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    page = figure.bbox
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 + 1 for box in boxes)


def test_names_are_not_parsed_as_formulas(tmp_path, figures):
    draw_curves({"_hidden": rows(), "$x_1^$": rows(), "漢字\n\x1b": rows()}, tmp_path / "x.png")
    assert names(figures[0]) == [" _hidden", "$x_1^$", "漢字 �"]


def test_files_are_reproducible(tmp_path):
    for draw, data in ((draw_by_length, {"a": [("1", 2.0, 3)]}), (draw_curves, {"a": rows()})):
        first, second = (draw(data, tmp_path / name).read_bytes() for name in ("1.png", "2.png"))
        assert first == second
        assert first.startswith(PNG)


LENGTHS = [LengthRange(1, 5), LengthRange(6, 10), LengthRange(11, None)]


def test_by_length_has_a_curve_for_each_model(tmp_path, figures):
    buckets = {
        "plain": [LengthBucket(each, 30 - 9.0 * i, 1200 - i, 0.5) for i, each in enumerate(LENGTHS)],
        "attention": [LengthBucket(each, 33.0, 1200 - i, 0.5) for i, each in enumerate(LENGTHS)],
    }
    draw_by_length(buckets, tmp_path / "lengths.png", score="exact match", title="Tatoeba")
    (axes,) = figures[0].axes
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[30, 21, 12], [33, 33, 33]]
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert ticks == ["1–5\n(1,200)", "6–10\n(1,199)", "11+\n(1,198)"]
    assert (axes.get_ylabel(), axes.get_title(), axes.get_ylim()[0]) == ("exact match", "Tatoeba", 0)


def test_a_missing_length_is_a_gap(tmp_path, figures):
    buckets = {
        "a": [LengthBucket(LENGTHS[0], 1.0, 9, 0), LengthBucket(LENGTHS[2], 2.0, 9, 0)],
        "b": [LengthBucket(LENGTHS[1], 3.0, 9, 0)],
    }
    draw_by_length(buckets, tmp_path / "x.svg")
    assert [list(line.get_xdata()) for line in figures[0].axes[0].get_lines()] == [[0, 2], [1]]


def test_errors(tmp_path):
    with pytest.raises(ArgumentError, match=r"x.gif': use the extension .png, .svg or .pdf"):
        draw_curves({"small": rows()}, tmp_path / "x.gif")
    with pytest.raises(ArgumentError, match="got no logs"):
        draw_curves({}, tmp_path / "x.png")
    with pytest.raises(ArgumentError, match="The log of 'small' has no rows yet"):
        draw_curves({"small": []}, tmp_path / "x.png")
    with pytest.raises(ArgumentError, match="got no lengths"):
        draw_by_length({"small": []}, tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


def comparison(*similarities: float, best: int = -1) -> Comparison:
    return Comparison(("bark", "Bark"), ("Dogs bark.", "Bark of $trees$"), torch.tensor(similarities), best)


def test_similarity_by_layer(tmp_path, figures):
    comparisons = {"minilm": comparison(1.0, 0.5, 0.25, best=1), "static": comparison(-0.5)}
    draw_comparison(comparisons, tmp_path / "x.svg")
    (axes,) = figures[0].axes
    first, star, second = axes.get_lines()
    assert list(first.get_ydata()) == [1.0, 0.5, 0.25]
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([1], [0.5])
    assert list(second.get_ydata()) == [-0.5]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["embedding", "1", "2"]
    assert axes.get_ylim()[0] < -0.5
    assert names(figures[0]) == ["minilm", "static"]


def test_one_comparison_is_named_by_its_words(tmp_path, figures):
    draw_comparison(comparison(1.0, 0.5), tmp_path / "x.png", dark=True)
    assert names(figures[0]) == ["bark in “Dogs bark.” and Bark in “Bark of $trees$”"]
    with pytest.raises(ArgumentError, match="got no comparisons"):
        draw_comparison({}, tmp_path / "y.png")


@pytest.mark.parametrize("heads", [1, 8, 20])
@pytest.mark.parametrize("dark", [False, True])
def test_a_line_for_each_head(heads, dark, tmp_path, figures):
    draw_by_distance([-1, 0, 1], [[-1.0 * i, 0, i] for i in range(heads)], tmp_path / "x.svg", dark=dark)
    lines = figures[0].axes[0].get_lines()
    assert [line.get_ydata()[2] for line in lines] == list(range(heads))
    assert len({line.get_color() for line in lines}) == heads
    assert len(names(figures[0])) == heads


def run(*arguments: str, status: int = 0) -> None:
    from regard.cli import main

    with pytest.raises(SystemExit) as left:
        main(["curves", *arguments])
    assert (left.value.code or 0) == status


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model folder with a log: best at step 200 of 300, after 4 of 6 minutes."""
    log = CsvLog(tmp_path / "small")
    log.on_begin("a model", 0, 300)
    for step, bleu in ((100, 10.0), (200, 31.25), (300, 30.0)):
        log.on_report(Report(step, 300, 1.0, 500 / step, 1e-3, 7800.0, step * 1.2, None))
        log.on_validation(ValidationResult(step, 600 / step, bleu, None, None, True))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_draws_and_prints_a_summary(folder, capsys):
    run("small", "--output", "curves.svg")
    assert capsys.readouterr().out == (
        "small  300 updates in 6.0 minutes; best dev BLEU 31.25 at update 200, after 4.0 minutes; "
        "lowest dev loss 2.000 at update 300\nPicture: curves.svg\n"
    )
    assert (folder / "curves.svg").read_bytes().startswith(b"<?xml")


def test_several_folders_and_files(folder, capsys):
    (folder / "other").mkdir()
    (folder / "other/log.csv").write_text(
        "step,epoch,loss,learning_rate,tokens_per_second,seconds,dev_loss,dev_bleu\n1,,2,,,,,\n"
    )
    run("small", "other/log.csv")
    assert capsys.readouterr().out.splitlines()[1] == "other  1 update"
    assert (folder / "curves.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "'nothing' does not exist; pass a folder written by regard train."),
        (["empty"], "'empty' has no log.csv; pass a folder written by regard train."),
        (["small", "small"], "'small' is given 2 times"),
        (["small", "-o", "x.txt"], "Cannot write 'x.txt': use the extension .png, .svg or .pdf."),
        (
            ["small", "-o", "no/x.png"],
            "--output 'no/x.png': the folder 'no' does not exist; create it first.",
        ),
        (["new"], "The log of 'new' has no rows yet; wait for the first report."),
        ([], "Missing argument"),
    ],
)
def test_errors_of_the_command_are_one_line(arguments, message, folder, capsys):
    (folder / "empty").mkdir()
    CsvLog(folder / "new").on_begin("a model", 0, 1)
    run(*arguments, status=2)
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith("regard: ")
    assert message in shown.err
