"""The fields of a row of data: which are a conversation, a question or an answer, and which must not be learnt."""

from collections.abc import Mapping
from typing import Any

from trimaran.core import UserError

CONVERSATIONS = ("conversations", "messages", "conversation", "dialogue")
# A question and its answer. The first pair that a row has counts.
QUESTIONS: tuple[tuple[str, str], ...] = (
    ("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("instruction", "output"),
    ("instruction", "response"), ("question", "response"), ("query", "response"), ("input", "output"),
)  # fmt: skip
CONTEXTS = ("input", "context")  # fields beside a question: Alpaca, Dolly
SYSTEMS = ("system", "system_prompt")
REJECTED = ("rejected_response", "rejected_messages")  # beside an ordinary conversation, as ms-swift has it
PREFERENCE_REASON = "it is preference data: data.text_field must name the answer to learn"


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field; `data.text` is the field `text` of the object `data`. None if there is none."""
    if name in row:
        return row[name]
    head, _, rest = name.partition(".")
    inner = row.get(head)
    return field_of(inner, rest) if rest and isinstance(inner, Mapping) else None


def is_messages(value: Any) -> bool:
    """Return whether the value is a list of messages with roles."""
    return isinstance(value, list) and bool(value) and all(
        isinstance(each, Mapping) and ("role" in each or "from" in each) for each in value
    )  # fmt: skip


def answer_fields(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that hold the conversation of a row, or its question and answer."""
    conversation = next(((name,) for name in CONVERSATIONS if row.get(name)), ())
    return conversation or next(
        (pair for pair in QUESTIONS if all(row.get(name) is not None for name in pair)), ()
    )  # fmt: skip


def learns_rejected(row: Mapping[str, Any], field: str) -> bool:
    """Return whether reading a row could learn an answer to avoid: a rejected one, or one that a label calls bad.

    A row with a rejected answer is read if `field` names another one.
    """
    texts = {str(name) for name, value in row.items() if value is not None and not isinstance(value, int | float)}
    has_rejected = any(
        "rejected" in name and (name in REJECTED or name.replace("rejected", "chosen") in texts) for name in texts
    )
    has_label = _is_verdict(row.get("kto_tag")) or _is_verdict(row.get("label"), as_number="completion" in row)
    if has_rejected and ("rejected" in field or field_of(row, field) is None):
        return True
    return has_label and not has_rejected and bool(answer_fields(row))


def _is_verdict(value: Any, *, as_number: bool = True) -> bool:
    """Return whether a label says if an answer is good: true or false, also as the text of a CSV file, or 0 or 1."""
    if isinstance(value, str):
        return value.strip().lower() in ("true", "false", *(("0", "1") if as_number else ()))
    return isinstance(value, bool) or (as_number and isinstance(value, int) and value in (0, 1))


def preference_error(where: str) -> UserError:
    return UserError("T077.preference-data", where=where)
