"""The reference lists every public name once and is up to date; papers.md names only existing objects."""

import re
import sys
from collections import Counter
from importlib import import_module
from inspect import ismodule, signature
from pathlib import Path
from typing import Any

import pytest

griffe = pytest.importorskip("griffe", reason="griffe is not installed")

from pages import docstrings, reference  # noqa: E402 (both import griffe)

ROOT = Path(__file__).parents[2]
PAPERS = ROOT / "docs/reference/papers.md"
PUBLIC = ("regard", "regard.models", "regard.translation")
DIRECTIVE = re.compile(r"^::: (?P<name>[\w.]+)$", re.MULTILINE)


def resolve(name: str) -> Any:
    """Return the object with a dotted name; a function takes precedence over a module of the same name."""
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


def directives() -> list[tuple[str, str]]:
    """Return the names with a directive, and their pages."""
    return [
        (match["name"], page.name)
        for page in sorted(reference.FOLDER.glob("*.md"))
        for match in DIRECTIVE.finditer(page.read_text("utf-8"))
    ]


def missing_or_duplicate(names: list[str]) -> list[str]:
    """Return the public objects that are not named exactly once."""
    counts = Counter(id(resolve(name)) for name in names)
    public = {
        id(value): f"{module}.{name}"
        for module in PUBLIC
        for name in import_module(module).__all__
        for value in [getattr(import_module(module), name)]
    }
    return sorted(name for key, name in public.items() if counts[key] != 1)


def test_every_public_name_is_on_one_page() -> None:
    assert missing_or_duplicate([name for name, _ in directives()]) == []


def test_missing_and_duplicate_names_are_reported() -> None:
    names = [name for name, _ in directives()]
    without = [name for name in names if name != "regard.attend"]
    assert missing_or_duplicate(without) == ["regard.attend"]
    assert missing_or_duplicate([*names, "regard.mechanism.operator.attend"]) == ["regard.attend"]


def test_every_name_has_a_docstring_with_an_example() -> None:
    for name, page in directives():
        value, text = resolve(name), reference.docstring(name)
        assert text, f"{name} on {page} has no docstring"
        exempt = ismodule(value) or name == "regard.translation.Links"  # a type alias
        assert exempt or ">>> " in text, f"the docstring of {name} has no example"


def test_pages_are_up_to_date() -> None:
    for path, text in reference.generated_pages().items():
        assert path.read_text("utf-8") == text, "run python -m pages.reference"


def test_changing_a_command_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reference.command_line()
    monkeypatch.setattr("regard.cli.demo.demo.__doc__", "Demo.\n\nExamples:\nregard demo --seed 1")
    assert "```console\nregard demo --seed 1\n```" in reference.command_line()
    assert "| `--seed N` |" in before
    assert "<code>--format tsv&#124;csv&#124;jsonl&#124;moses&#124;tmx</code>" in before


# -- docstrings


def docstring(text: str) -> str:
    """Return the Markdown of a function's docstring; the function has two parameters."""
    module = griffe.Module("regard")
    module["Beam"] = griffe.Class("Beam")
    parameters = griffe.Parameters(griffe.Parameter("size"), griffe.Parameter("n_best"))
    module["search"] = griffe.Function("search", parameters=parameters)
    return docstrings.markdown(text, module["search"])


def test_examples_become_code_blocks() -> None:
    assert (
        docstring("Two.\n\n>>> 1 + 1\n2\n\nAnd more.") == "Two.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nAnd more."
    )


def test_only_parameters_become_a_list() -> None:
    assert docstring("size: beam size,\n    at least 1. n_best: results\nnote: nothing") == (
        "- **`size`**: beam size,\n  at least 1.\n- **`n_best`**: results\n  note: nothing"
    )
    assert docstring("note: nothing") == "note: nothing"


def test_names_become_links_and_parameters_do_not() -> None:
    link = '<autoref identifier="regard.Beam" optional><code>Beam</code></autoref>'
    assert docstring("Uses `Beam` with `size`, not `unknown`.") == (
        f"Uses {link} with `size`, not `unknown`."
    )


# -- papers


def rows() -> list[list[str]]:
    """Return the rows of papers.md: the paper, its term, our names, our files."""
    lines = [line for line in PAPERS.read_text("utf-8").splitlines() if line.startswith("|")]
    return [
        [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split(" |")] for line in lines[2:]
    ]


def unknown(names: str) -> list[str]:
    """Return code in backquotes that is not an object with these arguments, a command or a setting."""
    return [code for code in re.findall(r"`([^`]+)`", names) if not _known(code)]


def _known(code: str) -> bool:
    from regard.cli.app import COMMANDS
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
            value = resolve(home + name)
        except (ModuleNotFoundError, AttributeError):
            continue
        return set(re.findall(r"(\w+)=", arguments)) <= set(signature(value).parameters if arguments else ())
    return False


def absent(files: str) -> list[str]:
    """Return the files in backquotes that do not exist."""
    folders = (ROOT / "src/regard", ROOT)
    return [
        file
        for file in re.findall(r"`([^`]+)`", files)
        if not any((folder / file).exists() for folder in folders)
    ]


def test_papers_name_existing_things() -> None:
    assert len(rows()) > 40
    for paper, term, names, files in rows():
        assert min(len(term), len(names)) > 0, paper
        assert (unknown(names), absent(files)) == ([], []), paper


def test_papers_are_sorted_by_year_and_unique() -> None:
    papers = [paper for paper, *_ in rows()]
    years = [int(re.search(r"\b(?:19|20)\d\d", paper)[0]) for paper in papers]  # type: ignore[index]
    assert years == sorted(years)
    assert len(set(papers)) == len(papers)


CITED = re.compile(r"\b([A-Z][\w-]+)(?: et al\.| (?:&|and) [A-Z][\w-]+)? ((?:19|20)\d\db?)\b")


def missing_papers(text: str) -> list[str]:
    """Return the papers cited on a page that are missing from papers.md."""
    papers = [paper.partition("*")[0] for paper, *_ in rows()]
    return [
        f"{name} {year}"
        for name, year in CITED.findall(text)
        if name not in MONTHS and not any(paper.startswith(name) and f" {year}" in paper for paper in papers)
    ]


MONTHS = {"November", "Nov"}


def test_every_cited_paper_is_listed() -> None:
    for page in sorted({*(ROOT / "docs").rglob("*.md")} - {PAPERS}):
        prose = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert missing_papers(prose) == [], page.name
    assert missing_papers("see Bahdanau et al. 2015 and Smith & Jones 1999") == ["Smith 1999"]


def test_missing_names_and_files_are_reported() -> None:
    assert unknown("`attend`, `Sotfmax`, `Beam(lenght=1.0)`, `regard lok`, `training.giude`") == [
        "Sotfmax",
        "Beam(lenght=1.0)",
        "regard lok",
        "training.giude",
    ]
    assert absent("`mechanism/scores.py`, `mechanism/gone.py`") == ["mechanism/gone.py"]
