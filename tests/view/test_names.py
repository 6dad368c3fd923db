"""The names of `regard.view`."""

import pytest

import regard.view


def test_every_name_is_that_of_its_home():
    assert sorted(regard.view.__all__) == sorted(regard.view._HOME_OF)
    for name, home in regard.view._HOME_OF.items():
        assert getattr(regard.view, name).__module__ == f"regard.view.{home}"


def test_there_are_no_others():
    with pytest.raises(AttributeError, match=r"'regard\.view' has no attribute 'draw'"):
        regard.view.draw  # noqa: B018
