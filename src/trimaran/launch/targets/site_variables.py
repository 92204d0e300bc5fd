"""Environment variables in a section of the site file: no secrets, which would get into the launch files."""

import re
from typing import Annotated

from pydantic import AfterValidator

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|(API|ACCESS|SECRET|PRIVATE)_KEY|CREDENTIALS?)$",
    re.IGNORECASE,
)


def variable_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names`; raise ValueError if one cannot be the name of a variable."""
    for name in names:
        if not VARIABLE.fullmatch(name):
            raise ValueError(f"'{name}' is not the name of a variable")
    return names


def _without_secrets(values: dict[str, str]) -> dict[str, str]:
    variable_names(tuple(values))
    for name in values:
        if SECRET_NAME.search(name):
            raise ValueError(f"'{name}' looks like a secret, and its value would be in the launch files; "
                             "pass secrets as the guide of the target says")  # fmt: skip
    return values


Variables = Annotated[dict[str, str], AfterValidator(_without_secrets)]
