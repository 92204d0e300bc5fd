"""What an architecture needs: how its config.json becomes a ModelSpec and back, and where its weights are on disk."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trimaran.models.config_fields import Fields
from trimaran.models.families.disk_parts import PartsOf, plain_parts
from trimaran.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of Hugging Face.

    `read` returns the spec that config.json describes; a field with an impossible value raises. `write` returns the
    fields of config.json beyond those that all architectures have: what `read` makes of the result must be the same
    spec, or the architecture cannot express it. `off` are features that the decoder lacks in this architecture, with
    the values that switch them off; `lacks` returns any other such feature, or an empty string. `extra_layers`: folders
    may have layers after the last one, which predict later tokens (MTP). They are read if the recipe trains them.
    """

    architecture: str
    read: Callable[[Fields], ModelSpec]
    write: Callable[[ModelSpec], dict[str, Any]]
    off: Mapping[str, tuple[Any, ...]]
    lacks: Callable[[Mapping[str, Any]], str] = lambda _: ""
    parts: PartsOf = plain_parts
    extra_layers: bool = False
