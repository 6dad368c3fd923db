"""Where the real data is: beside the project, as none of it is the project's."""

from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
