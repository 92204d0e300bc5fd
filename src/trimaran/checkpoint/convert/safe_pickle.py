"""Reads the data in a pickle without executing it: nothing is imported, looked up or called.

A pickle is a program. Torch writes the metadata of its distributed checkpoints as a pickle, and so every tensor in
them. Here the program is only parsed: a call is recorded as a `PickledCall`, and only a few names may be called.
"""

import pickletools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from trimaran.core import UserError


@dataclass(frozen=True, slots=True)
class GlobalName:
    """The full name of a module attribute. It is never looked up."""

    text: str


@dataclass(slots=True, eq=False)
class PickledCall:
    """A recorded call of `name` with `inputs`, and the state that would be set on the result. It is never made."""

    name: str
    inputs: Any
    state: Any = None


@dataclass(slots=True, eq=False)
class PickledDict:
    """A dict as a list of pairs. Its keys are untrusted, so they are never hashed or compared."""

    pairs: list[tuple[Any, Any]]

    def string_items(self) -> dict[str, Any]:
        """Return the pairs whose keys are strings, as a dict."""
        return {key: value for key, value in self.pairs if isinstance(key, str)}


@dataclass(slots=True, eq=False)
class PersistentId:
    """A persistent id: how torch refers to a tensor storage outside of the pickle."""

    value: Any


class UnsafePickleError(Exception):
    """The pickle uses something that plain data does not need."""


MARK = object()
CONSTANTS = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": lambda: (),
    "EMPTY_LIST": list,
    "EMPTY_DICT": lambda: PickledDict([]),
    "MARK": lambda: MARK,
}
LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
PUTS, GETS = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
IGNORED = {"PROTO", "FRAME"}


def read_pickle(program: bytes, *, names: Collection[str], where: str) -> Any:
    """Return the data in the pickle `program`: numbers, strings, tuples, lists, and the classes of this module.

    `names` are the full names that it may refer to. Time and memory are linear in the size of the program: repeated
    references stay one object.
    """
    reader = _PickleReader(names)
    try:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                return reader.result()
            reader.read(opcode.name, argument)
        raise UnsafePickleError("it does not end")
    except UnsafePickleError as error:
        raise UserError("K021", f"this pickle is more than data, and none of it was executed: {error}", where=where,
                        fix="use checkpoints from a source you trust; this one may be an attack") from None  # fmt: skip
    except (ValueError, IndexError, KeyError, TypeError, UnicodeError, OverflowError) as error:
        raise UserError("K022", f"the metadata is damaged: {type(error).__name__}", where=where,
                        fix="copy the checkpoint again, or use another one") from None  # fmt: skip


class _PickleReader:
    """The stack and the memo of the pickle machine."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.opcodes = {
            "MEMOIZE": lambda: self.memo.__setitem__(len(self.memo), self.top()),
            "TUPLE": lambda: self.stack.append(tuple(self.pop_to_mark())),
            "APPEND": lambda: self.extend_list([*self.pop(1)]),
            "APPENDS": lambda: self.extend_list(self.pop_to_mark()),
            "SETITEM": lambda: self.set_items([*self.pop(2)]),
            "SETITEMS": lambda: self.set_items(self.pop_to_mark()),
            "STACK_GLOBAL": lambda: self.push_global(*self.pop(2)),
            "REDUCE": self.push_call,
            "NEWOBJ": self.push_call,
            "BUILD": self.set_state,
            "BINPERSID": lambda: self.stack.append(PersistentId(*self.pop(1))),
        }

    def read(self, opcode: str, argument: Any) -> None:
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
            self.push_global(*argument.split(" ", 1))
        elif opcode in self.opcodes:
            self.opcodes[opcode]()
        elif opcode not in IGNORED:
            raise UnsafePickleError(f"it uses the opcode {opcode}")

    def result(self) -> Any:
        (value,) = self.pop(len(self.stack))
        return value

    def top(self) -> Any:
        if self.stack[-1] is MARK:
            raise ValueError("a mark is not a value")
        return self.stack[-1]

    def pop(self, count: int) -> tuple[Any, ...]:
        taken = tuple(self.stack[-count:])
        if len(taken) < count or any(each is MARK for each in taken):
            raise ValueError("the stack is too short")
        del self.stack[-count:]
        return taken

    def pop_to_mark(self) -> list[Any]:
        position = next((index for index in reversed(range(len(self.stack))) if self.stack[index] is MARK), None)
        if position is None:
            raise ValueError("there is no mark")
        taken = self.stack[position + 1 :]
        del self.stack[position:]
        return taken

    def extend_list(self, values: list[Any]) -> None:
        if not isinstance(self.top(), list):
            raise UnsafePickleError("it appends to something that is not a list")
        self.top().extend(values)

    def set_items(self, flat: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, PickledDict):
            raise UnsafePickleError("it sets items of something that is not a dict")
        target.pairs.extend(zip(flat[::2], flat[1::2], strict=True))

    def push_global(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "something without a name"
        if full not in self.names:
            raise UnsafePickleError(f"it refers to {full[:100]!r}")
        self.stack.append(GlobalName(full))

    def push_call(self) -> None:
        function, inputs = self.pop(2)
        if not isinstance(function, GlobalName) or not isinstance(inputs, tuple):
            raise UnsafePickleError("it calls something that is not a name")
        self.stack.append(PickledCall(function.text, inputs))

    def set_state(self) -> None:
        call, state = self.pop(2)
        if not isinstance(call, PickledCall) or call.state is not None:
            raise UnsafePickleError("it sets the state of something that is not a new object")
        call.state = state
        self.stack.append(call)
