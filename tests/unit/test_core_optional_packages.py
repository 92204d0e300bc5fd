"""Missing packages are reported before anything starts."""

from importlib.util import find_spec

import pytest

from trimaran.core import Plan, UserError, refuse_missing_packages


def test_a_missing_package_is_an_error_that_says_how_to_install_it() -> None:
    plan = Plan(engine="deepspeed")
    if find_spec("deepspeed"):
        refuse_missing_packages(plan)
        return
    with pytest.raises(UserError, match="deepspeed") as caught:
        refuse_missing_packages(plan)
    assert caught.value.code == "P037"
    assert "pip install" in caught.value.fix


def test_a_default_plan_needs_no_package() -> None:
    refuse_missing_packages(Plan())
    refuse_missing_packages(Plan(precision="fp8"))
