"""JSON schemas that answers have to follow: checked here, before a request waits."""

import json
from importlib.util import find_spec

from trimaran.core import UserError
from trimaran.serve.server.call_fields import ResponseFormat

MAX_SCHEMA_BYTES = 1 << 18
ANY_OBJECT = '{"type":"object"}'


def schema_of(wanted: ResponseFormat | None) -> str | None:
    """Return the text of the schema that a request asks for; None if any text will do. Raises UserError U011."""
    if wanted is None or wanted.type == "text":
        return None
    if find_spec("llguidance") is None:
        raise UserError("U011", "this server cannot guide JSON: the llguidance package is not installed",
                        where="response_format", fix="pip install 'trimaran[serve]' on the server")  # fmt: skip
    if wanted.type == "json_object":
        return ANY_OBJECT
    if wanted.json_schema is None:
        raise UserError("U001", "the schema is missing", where="response_format.json_schema",
                        fix="send json_schema: {name: ..., schema: {...}}")  # fmt: skip
    text = json.dumps(wanted.json_schema.definition, separators=(",", ":"))
    if len(text) > MAX_SCHEMA_BYTES:
        raise UserError("U011", f"the schema has more than {MAX_SCHEMA_BYTES:,} bytes",
                        where="response_format.json_schema", fix="send a smaller schema")  # fmt: skip
    _refuse_unsupported(text)
    return text


def _refuse_unsupported(schema: str) -> None:
    from llguidance import LLMatcher  # noqa: PLC0415 - optional

    try:
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    except ValueError as error:
        problem = str(error)
    if problem:
        raise UserError("U011", f"the schema cannot be used: {problem}", where="response_format.json_schema",
                        fix="correct the schema, or leave out what is not supported")  # fmt: skip
