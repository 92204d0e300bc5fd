"""Reads the configuration of another tool as pins of a plan: accelerate's YAML or DeepSpeed's JSON.

The files are those that `planner/emit` writes, and those that people have. Every field of a file ends up as a pin or in
the list of what was left out, with the reason.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from trimaran.core import TextError, UserError, load_json, load_yaml, read_regular_bytes

MAX_BYTES = 1 << 20
UNKNOWN = "this is no field that we know"
USUAL_MICRO_BATCH = 8  # rows: the default of transformers' Trainer
USUAL_TOKENS = 8192  # of a micro-batch of fewer rows, where they are long
AUTO = "auto: the Trainer of transformers decides it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadField:
    """A field of the file, and the pins that it became; or `why` it was left out."""

    name: str
    value: object
    pins: Mapping[str, object] = field(default_factory=dict)
    why: str = ""

    @property
    def text(self) -> str:
        shown = json.dumps(self.value, ensure_ascii=False, default=str)
        return f"{self.name} {shown if len(shown) <= 60 else shown[:57] + '...'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadConfig:
    """A tool's configuration as pins: recipe fields by dotted name. `num_devices` is 0 if the file does not say."""

    tool: str
    fields: tuple[ReadField, ...]
    num_devices: int = 0

    @property
    def pins(self) -> dict[str, object]:
        return {name: value for each in self.fields for name, value in each.pins.items()}

    @property
    def left_out(self) -> tuple[ReadField, ...]:
        return tuple(each for each in self.fields if each.why)

    def pins_on(self, num_devices: int) -> dict[str, object]:
        """Return the pins for a cluster of `num_devices`, with the global batch that they imply, if there is one.

        A file for another number of devices gets more or fewer replicas of its shards; if the devices hold no whole
        number of these, one replica with other shards. Its global batch stays, with another accumulation.
        """
        pins, data_ranks = self.pins, self._data_ranks(num_devices)
        if not data_ranks:
            return pins
        replicas, shards = (self._number(f"plan.mesh.dp_{axis}") for axis in ("replicate", "shard"))
        if replicas > 1 and shards and data_ranks % shards == 0:
            pins["plan.mesh.dp_replicate"] = data_ranks // shards
        elif shards > 1 and (data_ranks % shards or replicas):
            pins |= {"plan.mesh.dp_replicate": 1, "plan.mesh.dp_shard": data_ranks}
        total, micro, steps = map(self._number, ("train.global_batch", "plan.micro_batch", "plan.grad_accum"))
        if micro and steps and not total:
            pins["train.global_batch"] = micro * steps * data_ranks
        elif micro and steps and total % (micro * data_ranks) == 0:
            pins["plan.grad_accum"] = total // (micro * data_ranks)
        return pins

    def usual_batch_on(self, num_devices: int, seq_len: int) -> int:
        """Return the batch of a file with an accumulation but without a micro-batch, which is then a usual one; else 0.

        With the batch of a bare model a file with accumulation 1 would have micro-batches of 32 rows and more.
        """
        if self._number("plan.micro_batch") or self._number("train.global_batch"):
            return 0
        micro_batch = max(1, min(USUAL_MICRO_BATCH, USUAL_TOKENS // seq_len))
        return micro_batch * self._number("plan.grad_accum") * self._data_ranks(num_devices)

    def _data_ranks(self, num_devices: int) -> int:
        """Return how many ranks have data of their own; 0 if the inner axes do not divide the devices."""
        inner = prod(self._number(f"plan.mesh.{axis}") or 1 for axis in ("tp", "pp", "cp"))
        return 0 if num_devices % inner else num_devices // inner

    def _number(self, name: str) -> int:
        return int(str(self.pins.get(name, 0)))

    def as_dict(self) -> dict[str, Any]:
        """Return the translation for `--json`."""
        return {
            "tool": self.tool,
            "pins": self.pins,
            "read": [{"field": each.name, "value": each.value, "pins": dict(each.pins)}
                     for each in self.fields if not each.why],
            "left_out": [{"field": each.name, "value": each.value, "why": each.why} for each in self.left_out],
        }  # fmt: skip


class FieldReader:
    """Takes fields out of a tree one by one, and notes what became of them. `path` names the tree in messages."""

    def __init__(self, tree: Mapping[str, Any], file: str, path: str = "") -> None:
        self._tree, self._path, self.file = dict(tree), path, file
        self.fields: list[ReadField] = []

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a field and remove it from what is unread."""
        return self._tree.pop(name, default)

    def has(self, name: str) -> bool:
        """Return whether a field is unread and not null."""
        return self._tree.get(name) is not None

    def section(self, name: str) -> "FieldReader":
        """Return a reader for a field that is a mapping; empty if it is missing."""
        found = self.take(name, {})
        if not isinstance(found, Mapping):
            raise self.wrong(name, f"{json.dumps(found, default=str)} is not a mapping")
        return FieldReader(found, self.file, f"{self._path}{name}.")

    def pin(self, name: str, value: object, **pins: object) -> None:
        """Note that a field became pins of the plan; `__` in their names stands for a dot."""
        named = {f"plan.{each.replace('__', '.')}": pin for each, pin in pins.items()}
        self.fields.append(ReadField(name=f"{self._path}{name}", value=value, pins=named))

    def leave(self, name: str, value: object, why: str) -> None:
        self.fields.append(ReadField(name=f"{self._path}{name}", value=value, why=why))

    def count(self, name: str) -> int | None:
        """Return a field that is a positive number; None if it is missing or auto, which is noted."""
        value = self.take(name)
        if value is None:
            return None
        if value == "auto":
            self.leave(name, value, AUTO)
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
            raise self.wrong(name, f"{json.dumps(value, default=str)} is not a positive number")
        return int(value)

    def switch(self, name: str, default: bool | None = None) -> bool | None:
        """Return a field that is on or off; `default` if it is missing or auto, which is noted."""
        value = self.take(name)
        if value == "auto":
            self.leave(name, value, AUTO)
            return default
        if isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, f"{json.dumps(value, default=str)} is neither true nor false")
        return default if value is None else value

    def leave_rest(self, reasons: Mapping[str, str], default: str = UNKNOWN) -> None:
        """Note all unread fields as left out."""
        for name, value in self._tree.items():
            self.leave(name, value, reasons.get(name, default))
        self._tree = {}

    def wrong(self, name: str, what: str) -> UserError:
        return UserError("P070.wrong-file", where=self.file, path=self._path, name=name, text=what)

    def contradiction(self, what: str, fix: str) -> UserError:
        return UserError("P071", what, where=self.file, fix=fix)


def load_tree(path: Path) -> dict[str, Any]:
    """Return a file of YAML or JSON as a mapping; raise UserError if it is none."""
    try:
        raw = read_regular_bytes(path, follow_links=True, limit_bytes=MAX_BYTES + 1)
    except OSError as error:
        raise UserError("P070.file-cannot-read", where=str(path), reason=error.strerror) from None
    try:
        tree = (load_json if path.suffix == ".json" else load_yaml)(raw) if len(raw) <= MAX_BYTES else None
    except TextError as error:
        where = ", ".join(filter(None, (str(path), error.place)))
        raise UserError("P070.neither-yaml-nor", where=where, error=error.what) from None
    if not isinstance(tree, dict):
        raise UserError("P070.file-not-mapping", where=str(path))
    return {str(name): value for name, value in tree.items()}
