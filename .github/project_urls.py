"""Add the addresses of the project to pyproject.toml, for the packages that GitHub builds.

They are those of the repository that runs the workflow, so a fork does not point to another repository.
"""

import os
import sys
import tomllib
from pathlib import Path


def main(project: str) -> None:
    """Append [project.urls], unless pyproject.toml has it."""
    path = Path(project) / "pyproject.toml"
    if "urls" in tomllib.loads(path.read_text("utf-8"))["project"]:
        return
    name = os.environ["GITHUB_REPOSITORY"]  # owner/name
    repository = f"{os.environ['GITHUB_SERVER_URL']}/{name}"
    owner, _, site = name.partition("/")
    urls = {
        "Source": repository,
        "Documentation": f"https://{owner.lower()}.github.io/{site}/",
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }
    lines = [f'{label} = "{address}"\n' for label, address in urls.items()]
    with path.open("a", encoding="utf-8") as file:
        file.writelines(["\n[project.urls]\n", *lines])


if __name__ == "__main__":
    main(sys.argv[1])
