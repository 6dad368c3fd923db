"""A fuzzer for regard: `python -m tests.fuzz --minutes 10`.

A target is a module of this package with a function `run(case)`. It draws everything from `case.random`, so a
case is determined by its target and its number. It raises `Failure` if regard did something wrong; any other
exception that it raises is also a failure, as is a crash or a hang of the process.
"""
