"""The names of `regard.view`."""

import subprocess
import sys

import pytest

import regard.view


def test_every_name_is_that_of_its_home():
    assert sorted(regard.view.__all__) == sorted(regard.view._HOME_OF)
    for name, home in regard.view._HOME_OF.items():
        assert getattr(regard.view, name).__module__ == f"regard.view.{home}"


def test_names_are_offered_before_they_are_imported():
    program = "from regard import view as v; print(set(v.__all__) <= set(dir(v)), 'draw_mask' in vars(v))"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["True", "False"]


def test_there_are_no_others():
    with pytest.raises(AttributeError, match=r"'regard\.view' has no attribute 'draw'"):
        regard.view.draw  # noqa: B018
