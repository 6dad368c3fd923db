"""The package's metadata is consistent, its workflows and forms are well-formed, and its notebooks run."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import regard

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(
    set((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) - {ROOT / ".github/ISSUE_TEMPLATE/config.yml"}
)
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
ADDRESS = re.compile(r"[\w.]*github[\w.]*/[\w-]+/regard\b|[\w-]+\.github\.io\b")


def read(path):
    return yaml.safe_load((ROOT / path).read_text("utf-8"))


def test_the_version_comes_from_one_place():
    assert PROJECT["project"]["dynamic"] == ["version"]
    (provider,) = PROJECT["tool"]["dynamic-metadata"]
    assert f'__version__ = "{regard.__version__}"' in (ROOT / provider["input"]).read_text("utf-8")
    assert str(read("CITATION.cff")["version"]) == regard.__version__
    assert f"## [{regard.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_addresses_agree():
    """Files may use an address of the repository or the guide only if it is in pyproject.toml."""
    named = " ".join(PROJECT["project"].get("urls", {}).values())
    files = ["CITATION.cff", "README.md", "SECURITY.md", "benchmarks/tracked/asv.conf.json"]
    for path in [*NOTEBOOKS, ROOT / ".github/ISSUE_TEMPLATE/config.yml", *(ROOT / file for file in files)]:
        for address in ADDRESS.findall(path.read_text("utf-8")):
            assert address in named, (path, address)
    assert ADDRESS.findall("https://github.com/owner/regard and owner.github.io/regard") == [
        "github.com/owner/regard",
        "owner.github.io",
    ]


def test_the_readme_is_short_and_starts_with_six_lines_of_code():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 120
    assert text.startswith(
        "# regard\n\n**The attention weights of any PyTorch model, exactly, at any length, "
    )
    code = text.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) == 6


def test_supported_pythons_and_torch_are_tested():
    classifiers = {
        text.rpartition(" ")[2] for text in PROJECT["project"]["classifiers"] if "Python :: 3." in text
    }
    matrix = read(".github/workflows/tests.yml")["jobs"]["versions"]["strategy"]["matrix"]
    assert set(matrix["python"]) == classifiers
    oldest = re.search(r"torch>=([\d.]+)", " ".join(PROJECT["project"]["dependencies"]))[1]
    assert [f"{oldest}.*", "2.13.*"] == matrix["torch"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_well_formed(path):
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow[True]  # YAML reads `on` as a boolean
    assert workflow["permissions"] == {"contents": "read"}, "jobs ask for more where they need it"
    for name, job in workflow["jobs"].items():
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"]), name
        if "uses" in job:
            assert (ROOT / job["uses"]).exists()
            continue
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            # an expression in a script would execute the text of a title or a branch name
            assert "${{" not in step.get("run", ""), step
    for reference in re.findall(r"needs\.(\w+)", path.read_text("utf-8")):
        assert reference in workflow["jobs"]


def test_paths_in_workflows_exist():
    texts = [path.read_text("utf-8") for path in WORKFLOWS]
    paths = {path for text in texts for path in re.findall(r"(?<![\w/.])(?:tests|\.github)/[\w./]+\w", text)}
    assert {"tests/mechanism", ".github/project_urls.py"} <= paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    wheel = (ROOT / ".github/test_wheel.py").read_text("utf-8")
    for name in re.findall(r'"([\w/]+\.py)"', wheel):
        assert (ROOT / "tests/mechanism" / name).exists(), name


def test_packages_name_the_repository_that_builds_them(tmp_path):
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text("utf-8"), "utf-8")
    script = [sys.executable, str(ROOT / ".github/project_urls.py"), str(tmp_path)]
    repository = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "Owner/regard"}
    for _ in range(2):  # the second run changes nothing
        subprocess.run(script, env=os.environ | repository, check=True)
        project = tomllib.loads((tmp_path / "pyproject.toml").read_text("utf-8"))
        urls = project["project"]["urls"]
        assert urls["Source"] == "https://github.com/Owner/regard"
        assert urls["Documentation"] == "https://owner.github.io/regard/"
        assert project["tool"] == PROJECT["tool"]


def test_the_checker_of_workflows_can_fail(tmp_path):
    bad = tmp_path / "bad.yml"
    text = WORKFLOWS[0].read_text("utf-8").replace("contents: read", "contents: write")
    bad.write_text(text, "utf-8")
    with pytest.raises(AssertionError, match="jobs ask for more"):
        test_workflows_are_well_formed(bad)


def test_publishing_needs_no_token():
    job = read(".github/workflows/release.yml")["jobs"]["publish"]
    assert job["permissions"] == {"id-token": "write"}
    assert job["environment"]["name"] == "pypi"
    assert "secrets" not in (ROOT / ".github/workflows/release.yml").read_text("utf-8")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_well_formed(path):
    form = yaml.safe_load(path.read_text("utf-8"))
    assert {"name", "description", "body"} <= set(form)
    identifiers = [field["id"] for field in form["body"]]
    assert len(set(identifiers)) == len(identifiers)
    for field in form["body"]:
        assert field["type"] in {"textarea", "input", "dropdown", "checkboxes"}
        assert field["attributes"]["label"]


def test_kernels_share_the_openmp_of_torch():
    """A bundled copy of OpenMP would start a second thread pool."""
    commands = PROJECT["tool"]["cibuildwheel"]
    assert "--exclude libgomp.so.1" in commands["linux"]["repair-wheel-command"]
    assert "--exclude libomp" in commands["macos"]["repair-wheel-command"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_ready_for_colab(path):
    notebook = json.loads(path.read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"]]
    assert cells[1].startswith('%pip install --quiet "regard[')
    extras = re.search(r"\[(.*?)\]", cells[1])[1].split(",")
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    assert f"({path.name})" in (ROOT / "docs/notebooks/index.md").read_text("utf-8")


SHORTER = {
    "UPDATES = 600": "UPDATES = 3",
    "size=20000": "size=400",
    "16384": "2048",
    "seen.show()": "len(seen)",
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path):
    cells = [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    program = "\n".join("".join(cell["source"]) for cell in cells[1:])  # excluding the installation
    for long, short in SHORTER.items():
        program = program.replace(long, short)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
