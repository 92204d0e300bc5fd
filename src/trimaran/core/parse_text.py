"""Parses the YAML and JSON that people write; whatever is wrong with the text is one error, with its line if known."""

import json
import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

MAX_DEPTH = 20
MAX_INTEGER = 2**63 - 1  # of YAML: every reader of our files has 64-bit integers
MAX_JSON_INTEGER = 2**64 - 1  # ids of other programs may be unsigned
TOO_DEEP, ALIAS = "the nesting is too deep", "a YAML alias (*name) is not allowed"
MAX_SHOWN = 60  # characters of a wrong value in an error
INT, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
# What PyYAML's constructors raise for a value that does not have the type of its tag, such as `!!bool abc`.
CONSTRUCTOR_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
TYPE_NAMES = {"int": "integer", "bool": "true or false", "float": "number", "timestamp": "date"}
UNUSABLE = re.compile("[\x00\ud800-\udfff]")  # no file name, no UTF-8 text and no process argument can hold these


class TextError(ValueError):
    """The text is wrong. `line` and `column` count from 1; 0: not known. `fix` corrects a common mistake."""

    def __init__(self, what: str, line: int = 0, column: int = 0, fix: str = "") -> None:
        super().__init__(what)
        self.what, self.line, self.column, self.fix = what, line, column, fix

    @property
    def place(self) -> str:
        """`line 3, column 5`, as far as it is known."""
        return ", ".join(f"{name} {at}" for name, at in (("line", self.line), ("column", self.column)) if at)

    @property
    def is_refused(self) -> bool:
        """Whether the text is valid YAML or JSON of a form that no file of ours needs: deep nesting, an alias."""
        return self.what in (TOO_DEEP, ALIAS)


class YamlLoader(yaml.SafeLoader):
    """YAML 1.1 without base 60 numbers: `10:13` is a range of steps or a time of day, not 613.

    Every mistake is a YAMLError with its place: deep nesting, aliases, integers of more than 64 bits, values that are
    not of the type that their tag or form names (`!!int abc`, `2001-13-45`), characters that no file name can hold.
    """

    yaml_implicit_resolvers: ClassVar = {  # pyrefly: ignore[bad-override]
        first: [each for each in resolvers if each[0] not in (INT, FLOAT) or first == "."]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str | bytes) -> None:
        self._depth = 0
        super().__init__(stream)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self.check_event(yaml.AliasEvent):  # a few lines of aliases can mean gigabytes of values
            raise yaml.composer.ComposerError(None, None, ALIAS, self.peek_event().start_mark)
        if self._depth > MAX_DEPTH + 1:
            raise yaml.composer.ComposerError(None, None, TOO_DEEP, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep=deep)
        except CONSTRUCTOR_ERRORS:
            name = str(node.tag).rpartition(":")[2]
            raise _wrong_value(node, f"is not a valid {TYPE_NAMES.get(name, name)}") from None
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise _wrong_value(node, "is an integer of more than 64 bits")
        if isinstance(value, str) and (found := UNUSABLE.search(value)):
            raise _wrong_value(node, f"has a character that no text file holds: U+{ord(found[0]):04X}")
        return value


YamlLoader.add_implicit_resolver(INT, re.compile(r"^[-+]?(0|[1-9][0-9_]*|0b[01_]+|0[0-7_]+|0x[0-9a-fA-F_]+)$"),
                             list("-+0123456789"))  # fmt: skip
YamlLoader.add_implicit_resolver(FLOAT, re.compile(r"^[-+]?(([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+][0-9]+)?|"
                                               r"\.(inf|Inf|INF))$"), list("-+0123456789"))  # fmt: skip


def load_yaml(text: str | bytes) -> Any:
    """Return the value that `text` describes. Raises TextError, and nothing else."""
    return _parsed(text, lambda loader: loader.get_single_data())


def load_yaml_nodes(text: str | bytes, visit: Callable[[yaml.Node], None]) -> Any:
    """Return the value of `text` after `visit` has got its tree of nodes. Raises TextError, and nothing else."""

    def read(loader: YamlLoader) -> Any:
        if (root := loader.get_single_node()) is None:
            return None
        visit(root)
        return loader.construct_document(root)

    return _parsed(text, read)


def load_json(text: str | bytes) -> Any:
    """Return the value that `text` describes: strict JSON, with each key once. Raises TextError, and nothing else."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=without_duplicates, parse_int=_integer, parse_float=_number,
                          parse_constant=_number)  # fmt: skip
    except TextError:
        raise
    except json.JSONDecodeError as error:
        raise TextError(error.msg, error.lineno) from None
    except UnicodeDecodeError as error:
        raise TextError("it is not UTF-8 text", error.object[: error.start].count(b"\n") + 1) from None
    except RecursionError:
        raise TextError(TOO_DEEP) from None


def _parsed(text: str | bytes, read: Any) -> Any:
    try:
        loader = YamlLoader(text)
        try:
            return read(loader)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise _text_error(error, text) from None
    except yaml.reader.ReaderError as error:
        position = error.position if isinstance(error.position, int) else 0
        line = (text.count(b"\n", 0, position) if isinstance(text, bytes) else text.count("\n", 0, position)) + 1
        found = error.character
        code = found if isinstance(found, int) else ord(found) if len(found) == 1 else found[0]
        raise TextError(f"{error.reason}: character #x{int(code):04x}", line) from None
    except yaml.YAMLError as error:
        raise TextError(str(error).partition("\n")[0]) from None
    except RecursionError:
        raise TextError(TOO_DEEP) from None


def _text_error(error: yaml.MarkedYAMLError, text: str | bytes) -> TextError:
    """Return the error at the place of the mistake: an opening bracket or quote, not where the parser gave up."""
    what, mark, fix = error.problem or error.context or "unknown problem", error.problem_mark or error.context_mark, ""
    if mark is None:
        return TextError(what)
    if what.startswith("found character '\\t'"):
        what, fix = "there is a tab where only spaces are allowed", "replace the tab with spaces"
    elif error.context_mark and "quoted scalar" in str(error.context) and "end of stream" in what:
        what, mark, fix = "this quote is not closed", error.context_mark, "add the closing quote"
    elif error.context_mark and _is_unclosed(error, text):
        bracket = "}" if "mapping" in str(error.context) else "]"
        mark, fix = error.context_mark, f"add the closing '{bracket}'"
        what = f"this '{'{' if bracket == '}' else '['}' is not closed"
    elif what == "mapping values are not allowed here":
        what, fix = "a second ': ' in one line", "put a value that contains ': ' in quotes, or start a new line"
    return TextError(what, mark.line + 1, mark.column + 1, fix)


def _is_unclosed(error: yaml.MarkedYAMLError, text: str | bytes) -> bool:
    """Return whether a flow mapping or sequence has no end: the text ends, or a key of an outer level follows."""
    opened, found = error.context_mark, error.problem_mark
    if opened is None or found is None or not str(error.context).startswith("while parsing a flow"):
        return False
    lines = (text.decode("utf-8", "replace") if isinstance(text, bytes) else text).splitlines()
    if "<stream end>" in str(error.problem) or found.line >= len(lines):
        return True
    indents = [len(lines[mark.line]) - len(lines[mark.line].lstrip()) for mark in (opened, found)]
    return found.line > opened.line and indents[1] <= indents[0]


def _wrong_value(node: yaml.Node, what: str) -> yaml.MarkedYAMLError:
    value = str(node.value)
    shown = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}... ({len(value):,} characters)"
    return yaml.constructor.ConstructorError(None, None, f"'{UNUSABLE.sub('?', shown)}' {what}", node.start_mark)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; raise TextError if a key is set twice. A hook for `json.loads`."""
    tree = dict(pairs)
    if len(tree) != len(pairs):
        names = [name for name, _ in pairs]
        raise TextError(f"'{next(name for name in names if names.count(name) > 1)[:MAX_SHOWN]}' is set twice")
    return tree


def _integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > MAX_JSON_INTEGER:
        raise TextError(f"{text[:20]}{'...' if len(text) > 20 else ''} is an integer of more than 64 bits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if value - value != 0:  # NaN or infinite
        raise TextError(f"{text[:20]} is not a finite number")
    return value
