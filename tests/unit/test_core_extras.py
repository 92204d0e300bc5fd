"""Packages that a plan needs are asked for before anything starts."""

from importlib.util import find_spec

import pytest

from trimaran.core import Plan, UserError
from trimaran.core.extras import refuse_missing_extras


@pytest.mark.parametrize(
    ("plan", "package", "code"),
    [(Plan(precision="fp8"), "torchao", "P032"), (Plan(engine="deepspeed"), "deepspeed", "P037")],
)
def test_a_missing_package_is_told_with_how_to_install_it(plan: Plan, package: str, code: str) -> None:
    if find_spec(package):
        refuse_missing_extras(plan)
        return
    with pytest.raises(UserError, match=package) as told:
        refuse_missing_extras(plan)
    assert told.value.code == code
    assert "pip install" in told.value.fix


def test_a_plain_plan_needs_none() -> None:
    refuse_missing_extras(Plan())
