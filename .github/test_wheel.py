"""Test an installed wheel: it has kernels, except on Windows, and passes the operator's tests.

Run by cibuildwheel. The tests are copied, so they import the installed package and not the sources.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = ["test_operator.py", "test_laws.py", "masks/test_masks.py"]


def main(project: str) -> int:
    """Run the tests of the operator from a folder without sources; return pytest's exit status."""
    import regard.mechanism.fused as fused

    source = Path(project).resolve() / "src"
    assert source not in Path(fused.__file__).resolve().parents, (
        f"{fused.__file__} is not the installed wheel"
    )
    print(f"{fused.__file__}: {fused.DESCRIPTION}")
    if fused.available() == (sys.platform == "win32"):
        print("A wheel must have kernels, except on Windows.")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(project) / "tests", Path(folder) / "tests")
        shutil.copy(Path(project) / "pyproject.toml", folder)
        names = [*TESTS, "test_fused.py"] if fused.available() else TESTS
        files = [f"tests/mechanism/{name}" for name in names]
        return subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *files], cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
