"""The reference: every public name on one page, every page as it would be made, every paper's name there."""

import re
import sys
from collections import Counter
from importlib import import_module
from inspect import ismodule, signature
from pathlib import Path
from typing import Any

import pytest

griffe = pytest.importorskip("griffe", reason="the guide's tools are not installed")

from pages import docstrings, reference  # noqa: E402 (both import griffe)

ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "docs/reference/papers.md"
PUBLIC = ("regard", "regard.models", "regard.translation")
DIRECTIVE = re.compile(r"^::: (?P<name>[\w.]+)$", re.MULTILINE)


def found(name: str) -> Any:
    """The object that a dotted name means; of a function and a module of one name, the function."""
    first, *parts = name.split(".")
    value, path = import_module(first), first
    for part in parts:
        path = f"{path}.{part}"
        if hasattr(value, part):
            value = getattr(value, part)
        else:
            home = sys.modules.get(path.rpartition(".")[0])
            value = getattr(home, part) if hasattr(home, part) else import_module(path)
    return value


def shown() -> list[tuple[str, str]]:
    """The names with a directive, and the pages they stand on."""
    return [
        (one["name"], page.name)
        for page in sorted(reference.FOLDER.glob("*.md"))
        for one in DIRECTIVE.finditer(page.read_text("utf-8"))
    ]


def missing_or_twice(names: list[str]) -> list[str]:
    """The public names, by what they mean, that do not stand exactly once among these."""
    counts = Counter(id(found(name)) for name in names)
    public = {
        id(value): f"{module}.{name}"
        for module in PUBLIC
        for name in import_module(module).__all__
        for value in [getattr(import_module(module), name)]
    }
    return sorted(name for one, name in public.items() if counts[one] != 1)


def test_every_public_name_stands_on_one_page() -> None:
    assert missing_or_twice([name for name, _ in shown()]) == []


def test_a_name_that_is_left_out_or_stands_twice_is_told() -> None:
    names = [name for name, _ in shown()]
    without = [name for name in names if name != "regard.attend"]
    assert missing_or_twice(without) == ["regard.attend"]
    assert missing_or_twice([*names, "regard.mechanism.operator.attend"]) == ["regard.attend"]


def test_what_is_shown_is_there_with_a_docstring_and_an_example() -> None:
    for name, page in shown():
        value, text = found(name), reference.docstring(name)
        assert text, f"{name} on {page} has no docstring"
        plain = ismodule(value) or name == "regard.translation.Links"  # which is a type alias
        assert plain or ">>> " in text, f"the docstring of {name} has no example"


@pytest.mark.parametrize("path", reference.everything(), ids=lambda path: path.name)
def test_the_pages_are_as_they_would_be_made(path: Path) -> None:
    assert path.read_text("utf-8") == reference.everything()[path], "run python -m pages.reference"


def test_a_command_that_changes_changes_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reference.command_line()
    monkeypatch.setitem(reference.EXAMPLES, "demo", [("regard demo --seed 1", "")])
    assert reference.command_line() != before
    assert "| `--seed N` |" in before
    assert "<code>--model transformer&#124;recurrent&#124;plain</code>" in before


# -- docstrings


def docstring(text: str) -> str:
    """A docstring of a function of regard's with two parameters, as it stands on a page."""
    module = griffe.Module("regard")
    module["found"] = griffe.Class("found")
    parameters = griffe.Parameters(griffe.Parameter("size"), griffe.Parameter("best"))
    module["search"] = griffe.Function("search", parameters=parameters)
    return docstrings.markdown(text, module["search"])


def test_examples_become_code_with_their_empty_lines_outside() -> None:
    assert (
        docstring("Two.\n\n>>> 1 + 1\n2\n\nAnd more.") == "Two.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nAnd more."
    )


def test_parameters_become_a_list_and_other_words_with_a_colon_do_not() -> None:
    assert docstring("size: how many\n    there are. best: of them\nnote: nothing") == (
        "- **`size`**: how many\n  there are.\n- **`best`**: of them\n  note: nothing"
    )
    assert docstring("note: nothing") == "note: nothing"


def test_names_become_links_and_parameters_do_not() -> None:
    link = '<autoref identifier="regard.found" optional><code>found</code></autoref>'
    assert docstring("What `found` has, up to `size`, not `elsewhere`.") == (
        f"What {link} has, up to `size`, not `elsewhere`."
    )


# -- papers


def rows() -> list[list[str]]:
    """The rows of papers.md: the paper, what it is called there, the names here, the files."""
    lines = [line for line in PAPERS.read_text("utf-8").splitlines() if line.startswith("|")]
    return [
        [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split(" |")] for line in lines[2:]
    ]


def unknown(here: str) -> list[str]:
    """What is named in backquotes and cannot be found: a name and its arguments, a command, or a setting."""
    return [code for code in re.findall(r"`([^`]+)`", here) if not _known(code)]


def _known(code: str) -> bool:
    from regard.cli import COMMANDS
    from regard.translation import TranslationConfig

    if code.startswith("python -m "):
        return (ROOT / f"{code.removeprefix('python -m ').replace('.', '/')}.py").exists()
    if code.startswith("regard "):
        return any(code.removeprefix("regard ") in commands for commands in COMMANDS.values())
    section, _, setting = code.partition(".")
    if setting in TranslationConfig().to_dict().get(section, ()):
        return True
    name, _, arguments = code.partition("(")
    for home in ("", "regard.", "regard.models.", "regard.translation."):
        try:
            value = found(home + name)
        except (ModuleNotFoundError, AttributeError):
            continue
        return set(re.findall(r"(\w+)=", arguments)) <= set(signature(value).parameters if arguments else ())
    return False


def absent(files: str) -> list[str]:
    """The files in backquotes that are not there."""
    places = (ROOT / "src/regard", ROOT)
    return [
        file
        for file in re.findall(r"`([^`]+)`", files)
        if not any((place / file).exists() for place in places)
    ]


def test_papers_name_what_is_there() -> None:
    assert len(rows()) > 40
    for paper, there, here, files in rows():
        assert min(len(there), len(here)) > 0, paper
        assert (unknown(here), absent(files)) == ([], []), paper


def test_papers_are_sorted_by_year_and_stand_once() -> None:
    papers = [paper for paper, *_ in rows()]
    years = [int(re.search(r"\b(?:19|20)\d\d", paper)[0]) for paper in papers]  # type: ignore[index]
    assert years == sorted(years)
    assert len(set(papers)) == len(papers)


CITED = re.compile(r"\b([A-Z][\w-]+)(?: et al\.| (?:&|and) [A-Z][\w-]+)? ((?:19|20)\d\db?)\b")


def uncited(text: str) -> list[str]:
    """The papers that a page cites and that papers.md does not have."""
    papers = [paper.partition("*")[0] for paper, *_ in rows()]
    return [
        f"{name} {year}"
        for name, year in CITED.findall(text)
        if name not in MONTHS and not any(one.startswith(name) and f" {year}" in one for one in papers)
    ]


MONTHS = {"November", "Nov"}


def test_every_paper_that_a_page_cites_has_its_row() -> None:
    for page in sorted({*(ROOT / "docs").rglob("*.md")} - {PAPERS}):
        prose = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert uncited(prose) == [], page.name
    assert uncited("as Bahdanau et al. 2015 and Nobody & Somebody 1999 say") == ["Nobody 1999"]


def test_a_name_or_file_that_is_gone_is_told() -> None:
    assert unknown("`attend`, `Sotfmax`, `Beam(lenght=1.0)`, `regard lok`, `training.giude`") == [
        "Sotfmax",
        "Beam(lenght=1.0)",
        "regard lok",
        "training.giude",
    ]
    assert absent("`mechanism/scores.py`, `mechanism/gone.py`") == ["mechanism/gone.py"]
