"""Packages that a plan needs are asked for before anything starts."""

from importlib.util import find_spec

import pytest

from trimaran.core import Plan, UserError
from trimaran.core.optional_packages import refuse_missing_extras


def test_a_missing_package_is_told_with_how_to_install_it() -> None:
    plan = Plan(engine="deepspeed")
    if find_spec("deepspeed"):
        refuse_missing_extras(plan)
        return
    with pytest.raises(UserError, match="deepspeed") as told:
        refuse_missing_extras(plan)
    assert told.value.code == "P037"
    assert "pip install" in told.value.fix


def test_a_plain_plan_needs_none() -> None:
    refuse_missing_extras(Plan())
    refuse_missing_extras(Plan(precision="fp8"))
