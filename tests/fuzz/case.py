"""One fuzz case: its random numbers, its description, and its failures."""

import random
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch


class Failure(BaseException):
    """A detected bug. `kind` is the same for all cases with the same cause; `detail` has the numbers.

    It is not an Exception, so the code under test cannot catch it.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


@dataclass
class Case:
    """The case `number` of a target.

    shared: a folder that all cases of a run share, for objects that are expensive to create.
    report: sends the description to the parent process before anything dangerous happens.
    """

    target: str
    number: int
    shared: Path
    report: Callable[[str], None] = lambda text: None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.target} {self.number}")
        torch.manual_seed(self.random.getrandbits(60))

    def note(self, text: str) -> None:
        """Add to the description of the case, once."""
        if text in self.notes:
            return
        self.notes.append(text)
        self.report("; ".join(self.notes))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return normal numbers; the seed is drawn from the case."""
        generator = torch.Generator().manual_seed(self.random.getrandbits(60))
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def signature(error: BaseException) -> str:
    """Return a text that is equal for equal causes: the failure's kind, or the exception type and origin."""
    if isinstance(error, Failure):
        return error.kind
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if "/regard/" in frame.filename] or frames
    place = f"{Path(inside[-1].filename).name}, {inside[-1].name}" if inside else "?"
    return f"{type(error).__name__} from {place}"


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Fail if the block takes longer. Interrupts Python code and blocking system calls."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Failure(f"{what} does not end", f"not within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
