"""The site file: a site's defaults for each target, `~/.config/trimaran/targets.yaml`."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ValidationError

from trimaran.core import TextError, UserError, did_you_mean, load_yaml, read_regular_bytes, templated
from trimaran.launch.targets.target import TARGET_CLASSES, target_names
from trimaran.machine import first_error

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

MAX_SITE_BYTES = 1 << 16
EXAMPLE = "slurm: {partition: gpu, account: llm}"


def site_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the site file: `$TRIMARAN_TARGETS`, or `targets.yaml` in the user's configuration folder."""
    if named := environ.get("TRIMARAN_TARGETS"):
        return Path(named)
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "trimaran" / "targets.yaml"


def read_site_file(path: Path) -> dict[str, Any]:
    """Return the sections by target; empty if there is no such file. Raises UserError if it is not such a file."""
    try:
        raw = read_regular_bytes(path, follow_links=True, limit_bytes=MAX_SITE_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError("L003.site-file-cannot-read", where=str(path), reason=error.strerror) from None
    try:
        tree = load_yaml(raw) if len(raw) <= MAX_SITE_BYTES else None
    except TextError as error:
        where = templated("{path}, line {line}", path=path, line=error.line) if error.line else str(path)
        raise UserError("L003.not-yaml", where=where, error=error.what, example=EXAMPLE) from None
    if tree is None and not raw.strip():
        return {}
    if not isinstance(tree, dict):
        raise UserError("L003.site-file", where=str(path), example=EXAMPLE)
    for name in tree:
        if name not in TARGET_CLASSES and name not in (known := target_names()):
            raise UserError(
                "L003.no-target",
                where=str(path),
                name=name,
                guess=did_you_mean(str(name), known),
                known=", ".join(known),
            )
    return tree


def site_section(
    tree: Mapping[str, Any], target: str, model: type[BaseModel], settings: Sequence[str], *, where: str
) -> Any:
    """Return the section of a target, with `settings` on top: `FIELD=VALUE`, the value in YAML unless it is a text."""
    given = tree.get(target) or {}
    if not isinstance(given, dict):
        raise UserError("L003.section-not-mapping", where=where, target=target, example=EXAMPLE)
    values = dict(given)
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator:
            raise UserError("L004.not-field-value", where="--site", setting=setting, target=target, names=_names(model))
        if name not in model.model_fields:
            raise UserError(
                "L004.no-field",
                where="--site",
                target=target,
                name=name,
                guess=did_you_mean(name, model.model_fields),
                names=_names(model),
            )
        values[name] = _value(text, is_text=model.model_fields[name].annotation is str)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = first_error(error, model, code="L003", where=f"{target} in {where}")
        path = error.errors()[0]["loc"]
        if path and path[0] in {setting.partition("=")[0] for setting in settings}:
            fix = f"use another value; the guide of {target} explains the field"
            found = UserError("L003", found.what, where=f"--site {path[0]}=...", fix=fix)
        raise found from None


def _names(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields) or "none"


def _value(text: str, *, is_text: bool) -> Any:
    """Return the value of a setting. Of a field that is a text, `10` and `1e3` are what they look like."""
    try:
        value = json.loads(text)
        return text if is_text and not isinstance(value, str) else value
    except ValueError:
        if is_text:
            return text
        try:
            return load_yaml(text.encode())
        except TextError:
            return text
