"""Public calls reach the code that does the work through only a few files."""

import graphlib
import os
import webbrowser
from collections import Counter
from pathlib import Path

import pytest
import torch

import regard
from regard.mechanism import dispatch, fused
from regard.translation import load_translator
from tests.mechanism.test_dispatch import called_files, run_traced

pytestmark = pytest.mark.skipif(
    not fused.available() or dispatch.FROM_ENVIRONMENT is not None, reason="needs the kernels"
)
FOLDER = os.path.dirname(regard.__file__)
DATES = Path(FOLDER, "app/models/dates")
# Decorators of public functions, which do no work themselves.
DECORATORS = {"_hinted.<locals>.call", "in_own_dtype.<locals>.wrapper"}


def deepest_stack(function):
    """Return the largest set of regard's files that are on the call stack at once."""
    deepest: set[str] = set()

    def trace(frame, event, _):
        nonlocal deepest
        if not frame.f_code.co_filename.startswith(FOLDER):
            return
        files = set()
        while frame is not None:
            if frame.f_code.co_qualname not in DECORATORS:
                files.add(frame.f_code.co_filename)
            frame = frame.f_back
        files = {name for name in files if name.startswith(FOLDER)}
        if len(files) > len(deepest):
            deepest = files

    run_traced(function, trace)
    return deepest


def weights_of_a_call():
    x = torch.randn(2, 3, 6, 8)
    return regard.attend(x, x, x)[1]


def watched():
    model, x = torch.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(1, 5, 16)
    with regard.watch(model) as seen:
        model(x, x, x)
    return seen


def test_topk_reads_five_files_and_never_goes_back():
    weights_of_a_call().topk(5)  # triggers lazy imports
    weights = weights_of_a_call()
    calls = called_files(lambda: weights.topk(5))
    list(graphlib.TopologicalSorter(calls).static_order())  # raises CycleError
    assert len(calls) <= 5, sorted(calls)


def test_watch_and_show_have_few_files_open(monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda *_: True)
    watched().show()
    assert len(deepest_stack(watched)) <= 7
    assert len(deepest_stack(watched().show)) <= 9


def test_translate_has_few_files_open():
    translator = load_translator(DATES)
    translator.translate("5 March 2020")
    assert len(deepest_stack(lambda: translator.translate("7 May 2020"))) <= 6


def test_an_open_file_is_counted_once():
    x = torch.randn(2, 3, 6, 8, dtype=torch.bfloat16)
    regard.attention(x, x, x)
    files = deepest_stack(lambda: regard.self_attention(x))  # operator.py twice
    assert {os.path.basename(name) for name in files} == {"operator.py", "torch_state.py"}


def test_no_folder_has_more_than_fifteen_modules():
    modules = Counter(path.parent for path in Path(FOLDER).rglob("*.py"))
    assert not {folder: count for folder, count in modules.items() if count > 15}
