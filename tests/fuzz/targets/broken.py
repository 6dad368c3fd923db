"""Fail in every possible way, to prove that the runner detects it."""

import os
import signal
import time

from tests.fuzz.case import Case, Failure


def run(case: Case) -> None:
    case.note(f"way {case.number % 5}")
    match case.number % 5:
        case 1:
            raise Failure("a failure", "with a detail")
        case 2:
            raise KeyError("an exception")
        case 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        case 4:
            time.sleep(60)
