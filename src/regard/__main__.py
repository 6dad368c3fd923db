"""Run the command line with `python -m regard`."""

from regard.cli import script

if __name__ == "__main__":
    script()
