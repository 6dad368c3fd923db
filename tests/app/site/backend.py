"""Run the backend of the static site in deno and node."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from regard.app.site.build import describe_site
from regard.app.site.models import SiteModel

_DENO = shutil.which("deno", path=str(Path(sys.executable).parent)) or shutil.which("deno")
_NODE = shutil.which("node")
needs_deno = pytest.mark.skipif(_DENO is None, reason="deno is not installed")
RUNTIMES = [
    "deno",
    pytest.param("node", marks=pytest.mark.skipif(_NODE is None, reason="node is not installed")),
]


def ask(
    folder: Path, models: Sequence[SiteModel], requests: Sequence[tuple[str, Any]], runtime: str = "deno"
) -> list[Any]:
    """Return the response to each request (path, body)."""
    (folder / "site.json").write_text(json.dumps(describe_site(models)))
    for number, model in enumerate(models):
        (folder / f"{number}.safetensors").write_bytes(model.weights)
    (folder / "requests.json").write_text(json.dumps(requests))
    run_script("ask.js", folder, runtime)
    return json.loads((folder / "answers.json").read_text())


def run_script(name: str, folder: Path, runtime: str = "deno") -> None:
    """Run a script in this folder; deno may only read and write files."""
    command = _node_command() if runtime == "node" else [str(_DENO), "run", *_DENO_OPTIONS]
    subprocess.run([*command, str(Path(__file__).with_name(name)), str(folder)], check=True, timeout=120)


_DENO_OPTIONS = ("--quiet", "--no-config", "--allow-read", "--allow-write")


def _node_command() -> list[str]:
    """Return the command that runs ES modules; node detects them itself from version 22."""
    version = subprocess.run([str(_NODE), "--version"], capture_output=True, text=True, check=True).stdout
    old = int(version.removeprefix("v").partition(".")[0]) < 22
    return [str(_NODE), *["--no-warnings", "--experimental-default-type=module"] * old]
