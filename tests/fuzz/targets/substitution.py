"""regard's function in place of torch's, in a process that has not used either yet."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import regard
from tests.fuzz.case import Case, Failure, signature

NAME = "scaled_dot_product_attention"


def run(case: Case) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "the function": lambda: regard.scaled_dot_product_attention,
        "a lambda": lambda: lambda *args, **more: regard.scaled_dot_product_attention(*args, **more),
        "a partial": lambda: functools.partial(lambda *args, **more: getattr(regard, NAME)(*args, **more)),
    }
    way = case.random.choice(list(ways))
    used, grad, batched = case.chance(0.3), case.chance(0.5), case.chance(0.5)
    case.note(f"functional.{NAME} = {way}, regard's used before {used}, grad {grad}, batched {batched}")

    def scenario() -> None:
        x = torch.randn(*((2,) if batched else ()), 2, 5, 8, requires_grad=grad)
        wanted = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        if used:
            regard.scaled_dot_product_attention(x, x, x)
        setattr(functional, NAME, ways[way]())
        for options in (
            {"is_causal": True},
            {"attn_mask": torch.ones(5, 5).tril().bool()},
            {"dropout_p": 0.5},
        ):
            found = functional.scaled_dot_product_attention(x, x, x, **options)
            if "dropout_p" not in options and not torch.allclose(found, wanted, atol=1e-5):
                raise Failure("the result is another one")
        layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        layer(x[0], x[0], x[0], need_weights=False)

    problem = in_child(scenario)
    if problem:
        raise Failure(problem)


def in_child(work: Callable[[], None]) -> str:
    """Run a function in a forked process; return the error, or an empty string."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(write, f"{signature(error)}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        message = pipe.read()
    _, status = os.waitpid(child, 0)
    return message or (f"the process died, status {status}" if status else "")
