"""Benchmarks for asv over the table of cases that the tests use.

cd benchmarks/tracked
asv run --python=same --quick            # this environment, each benchmark once
asv continuous --interleave-rounds main HEAD   # compare two commits on one machine
"""
