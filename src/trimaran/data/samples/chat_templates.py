"""Chat templates: the text around each turn of a conversation."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trimaran.data.text.tokenizer import Tokenizer

# Special tokens in the texts below; `{end}` is the tokenizer's end-of-document token.
SPECIAL = re.compile(r"(<\|[a-z_]+\|>|</?s>|\{end\})")


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """The text around a turn. `end` ends the turn, so it is a target in assistant turns; `after` is never a target."""

    before: str
    end: str
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """The text at the start of a conversation and around its turns. A matching tokenizer has `required_tokens`."""

    turns: Mapping[str, TurnFormat]
    begin: str = ""
    default_system: str = ""  # the system turn of conversations without one
    required_tokens: tuple[str, ...] = field(default=())


TEMPLATES = {
    "chatml": ChatTemplate(
        turns={
            role: TurnFormat(f"<|im_start|>{role}\n", "<|im_end|>", "\n") for role in ("system", "user", "assistant")
        },
        required_tokens=("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": ChatTemplate(
        begin="<|begin_of_text|>",
        turns={
            role: TurnFormat(f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")
            for role in ("system", "user", "assistant")
        },
        required_tokens=("<|start_header_id|>", "<|eot_id|>"),
    ),
    "vicuna": ChatTemplate(
        begin="<s>",
        turns={
            "system": TurnFormat("", " "),
            "user": TurnFormat("USER: ", " "),
            "assistant": TurnFormat("ASSISTANT: ", "</s>"),
        },
        default_system="A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
        required_tokens=("<s>", "</s>"),
    ),
    "plain": ChatTemplate(
        turns={"system": TurnFormat("", "\n"), "user": TurnFormat("", "\n"), "assistant": TurnFormat("", "{end}")},
    ),
}


def choose_template(name: str, tokenizer: Tokenizer) -> str:
    """Return `name`; for `auto`, the first template whose special tokens the tokenizer has. `plain` needs none."""
    if name != "auto":
        return name
    return next(
        each
        for each, template in TEMPLATES.items()
        if all(tokenizer.special(token) is not None for token in template.required_tokens)
    )
