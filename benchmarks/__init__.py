"""Benchmarks of regard and other libraries: `make bench`, or `python -m benchmarks [group …] [--quick]`."""
