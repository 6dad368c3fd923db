"""Packages that import their public names on first use."""

import importlib
import subprocess
import sys

import pytest

PACKAGES = ["regard", "regard.models", "regard.translation", "regard.plot", "regard.app"]


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_can_be_imported_and_are_not_submodules(package):
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        value = getattr(module, name)
        importlib.import_module(getattr(value, "__module__", None) or value.__name__)
        assert getattr(module, name) is value  # not replaced by the import of its module


def test_names_are_listed_before_they_are_imported():
    program = "from regard import plot; print(set(plot.__all__) <= set(dir(plot)), 'draw_mask' in vars(plot))"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == ["True", "False"]


def test_an_unknown_name_raises_with_a_suggestion():
    import regard.plot

    with pytest.raises(AttributeError, match=r"no attribute 'draw_masks'; did you mean 'draw_mask'"):
        regard.plot.draw_masks  # noqa: B018
