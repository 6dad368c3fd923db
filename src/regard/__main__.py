"""Run the command line with `python -m regard`."""

from regard.cli import main

if __name__ == "__main__":
    main()
