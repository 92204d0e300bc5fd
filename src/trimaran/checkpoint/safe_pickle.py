"""Reads the values out of a pickle without obeying it: nothing is imported, looked up or called.

A pickle is a program. Torch writes the table of contents of its distributed checkpoints as one, and so does it with
every tensor in them. Here the program is only read: where it says "call this", the result is a note that it said so,
and it may say so of a handful of names.
"""

import pickletools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from trimaran.core import UserError


@dataclass(frozen=True, slots=True)
class Name:
    """Something in a module, by its full name. It stays a name."""

    text: str


@dataclass(slots=True, eq=False)
class Made:
    """What a program wants to make by calling `name` with `inputs`, and the state that it wants to give it."""

    name: str
    inputs: Any
    state: Any = None


@dataclass(slots=True, eq=False)
class Table:
    """A dict as a list of pairs: its keys are whatever was written, so they are never hashed or compared."""

    pairs: list[tuple[Any, Any]]

    def texts(self) -> dict[str, Any]:
        """Return the pairs whose keys are text."""
        return {key: value for key, value in self.pairs if isinstance(key, str)}


@dataclass(slots=True, eq=False)
class Outside:
    """What lies outside of the pickle, as the pickle refers to it: torch's way to name the memory of a tensor."""

    label: Any


class RefusalError(Exception):
    """The program wants something that plain data does not need."""


MARK = object()
CONSTANTS = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": lambda: (),
    "EMPTY_LIST": list,
    "EMPTY_DICT": lambda: Table([]),
    "MARK": lambda: MARK,
}
LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
PUTS, GETS = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
SILENT = {"PROTO", "FRAME"}


def read_opcodes(program: bytes, *, names: Collection[str], where: str) -> Any:
    """Return what the pickle `program` holds: numbers, text, tuples, lists, and the nouns of this file.

    `names` are the full names that it may mention. Work and memory are linear in the size of the program: what it
    repeats by reference stays one object.
    """
    reader = _Reader(names)
    try:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                return reader.result()
            reader.obey(opcode.name, argument)
        raise RefusalError("it has no end")
    except RefusalError as error:
        raise UserError("K021", f"this is more than data, and nothing of it was obeyed: {error}", where=where,
                        fix="use checkpoints whose origin you know; this one may be an attack") from None  # fmt: skip
    except (ValueError, IndexError, KeyError, TypeError, UnicodeError, OverflowError) as error:
        raise UserError("K022", f"the table of contents is damaged: {type(error).__name__}", where=where,
                        fix="copy the checkpoint again, or use another one") from None  # fmt: skip


class _Reader:
    """The stack and the memo of the machine that a pickle is written for."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.verbs = {
            "MEMOIZE": lambda: self.memo.__setitem__(len(self.memo), self.top()),
            "TUPLE": lambda: self.stack.append(tuple(self.to_mark())),
            "APPEND": lambda: self.append([*self.pop(1)]),
            "APPENDS": lambda: self.append(self.to_mark()),
            "SETITEM": lambda: self.set_items([*self.pop(2)]),
            "SETITEMS": lambda: self.set_items(self.to_mark()),
            "STACK_GLOBAL": lambda: self.mention(*self.pop(2)),
            "REDUCE": self.make,
            "NEWOBJ": self.make,
            "BUILD": self.build,
            "BINPERSID": lambda: self.stack.append(Outside(*self.pop(1))),
        }

    def obey(self, opcode: str, argument: Any) -> None:
        if opcode in LITERALS:
            self.stack.append(argument)
        elif opcode in CONSTANTS:
            self.stack.append(CONSTANTS[opcode]())
        elif opcode in GETS:
            self.stack.append(self.memo[argument])
        elif opcode in PUTS:
            self.memo[argument] = self.top()
        elif opcode in TUPLES:
            self.stack.append(self.pop(TUPLES[opcode]))
        elif opcode == "GLOBAL":
            self.mention(*argument.split(" ", 1))
        elif opcode in self.verbs:
            self.verbs[opcode]()
        elif opcode not in SILENT:
            raise RefusalError(f"it uses the instruction {opcode}")

    def result(self) -> Any:
        (value,) = self.pop(len(self.stack))
        return value

    def top(self) -> Any:
        if self.stack[-1] is MARK:
            raise ValueError("a mark is no value")
        return self.stack[-1]

    def pop(self, count: int) -> tuple[Any, ...]:
        taken = tuple(self.stack[-count:])
        if len(taken) < count or any(each is MARK for each in taken):
            raise ValueError("the stack is too short")
        del self.stack[-count:]
        return taken

    def to_mark(self) -> list[Any]:
        place = next((index for index in reversed(range(len(self.stack))) if self.stack[index] is MARK), None)
        if place is None:
            raise ValueError("there is no mark")
        taken = self.stack[place + 1 :]
        del self.stack[place:]
        return taken

    def append(self, values: list[Any]) -> None:
        if not isinstance(self.top(), list):
            raise RefusalError("it appends to something that is no list")
        self.top().extend(values)

    def set_items(self, flat: list[Any]) -> None:
        table = self.top()
        if not isinstance(table, Table):
            raise RefusalError("it sets items of something that is no dict")
        table.pairs.extend(zip(flat[::2], flat[1::2], strict=True))

    def mention(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "something without a name"
        if full not in self.names:
            raise RefusalError(f"it names {full[:100]!r}")
        self.stack.append(Name(full))

    def make(self) -> None:
        what, inputs = self.pop(2)
        if not isinstance(what, Name) or not isinstance(inputs, tuple):
            raise RefusalError("it calls something that is no name")
        self.stack.append(Made(what.text, inputs))

    def build(self) -> None:
        made, state = self.pop(2)
        if not isinstance(made, Made) or made.state is not None:
            raise RefusalError("it gives a state to something that was not just made")
        made.state = state
        self.stack.append(made)
