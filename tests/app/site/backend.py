"""Run the backend of the static site in deno."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from regard.app.site import describe_site
from regard.app.site_models import SiteModel

_DENO = shutil.which("deno", path=str(Path(sys.executable).parent)) or shutil.which("deno")
needs_deno = pytest.mark.skipif(_DENO is None, reason="deno is not installed")


def ask(folder: Path, models: Sequence[SiteModel], requests: Sequence[tuple[str, Any]]) -> list[Any]:
    """Return the answer of each request (path, body)."""
    (folder / "site.json").write_text(json.dumps(describe_site(models)))
    for number, model in enumerate(models):
        (folder / f"{number}.safetensors").write_bytes(model.weights)
    (folder / "requests.json").write_text(json.dumps(requests))
    run_script("ask.js", folder)
    return json.loads((folder / "answers.json").read_text())


def run_script(name: str, folder: Path) -> None:
    """Run a script of this folder, which may only read and write files."""
    assert _DENO is not None
    script = Path(__file__).with_name(name)
    command = [
        _DENO,
        "run",
        "--quiet",
        "--no-config",
        "--allow-read",
        "--allow-write",
        str(script),
        str(folder),
    ]
    subprocess.run(command, check=True, timeout=120)
