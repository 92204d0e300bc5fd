"""Which layers have an attention window, by `layer_types` or the fields that older configs have instead."""

from collections.abc import Mapping, Sequence
from typing import Any

from trimaran.models.config_fields import Fields, bad_field, show
from trimaran.models.layer_variations import repeated_part
from trimaran.models.spec import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types_lack(config: Mapping[str, Any]) -> str:
    """Return the layer types if the decoder lacks one of them; an empty string if not."""
    types = config.get("layer_types") or []
    known = isinstance(types, list) and all(each in (FULL, SLIDING) for each in types)
    return "" if known else f"layer_types is {show(types)}"


def read_windows(fields: Fields, window: int, sliding: Sequence[bool]) -> tuple[int, ...]:
    """Return the windows of the layers, up to where they repeat: (), if no layer has one.

    `sliding` says which layers have the window if config.json has no `layer_types`.
    """
    types, layers = fields.config.get("layer_types"), len(sliding)
    if types:
        if len(types) != layers:
            raise bad_field("layer_types", f"{len(types)} types for {layers} layers", fields.where)
        sliding = [each == SLIDING for each in types]
    windows = [window if each else 0 for each in sliding]
    return repeated_part(windows) if any(windows) else ()


def every_nth_full(layers: int, period: int) -> list[bool]:
    """Return which layers have a window if every `period`-th, counted from 1, has none."""
    return [(number + 1) % max(period, 1) != 0 for number in range(layers)]


def written_types(spec: ModelSpec) -> dict[str, Any]:
    """Return `layer_types`, and the window: the only one, or one that no layer has."""
    windows = [spec.layer(number).window for number in range(spec.layers)]
    return {
        "layer_types": [FULL if each is None else SLIDING for each in windows],
        "sliding_window": max((each for each in windows if each is not None), default=None),
    }
