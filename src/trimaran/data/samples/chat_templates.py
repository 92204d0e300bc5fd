"""How a conversation is written: what stands before and behind what each speaker says."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trimaran.data.tokenizer import Tokenizer

# What may be a token of its own in the texts below; `{end}` is the one that ends a document.
SPECIAL = re.compile(r"(<\|[a-z_]+\|>|</?s>|\{end\})")


@dataclass(frozen=True, slots=True)
class Frame:
    """What surrounds a turn. `end` says that the speaker is done, so an assistant has to learn it; `after` is not."""

    before: str
    end: str
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """How a conversation begins and what surrounds its turns. `knows` are tokens that a tokenizer made for it has."""

    frames: Mapping[str, Frame]
    begin: str = ""
    greeting: str = ""  # what a system says when nobody says anything else
    knows: tuple[str, ...] = field(default=())


TEMPLATES = {
    "chatml": Template(
        frames={role: Frame(f"<|im_start|>{role}\n", "<|im_end|>", "\n") for role in ("system", "user", "assistant")},
        knows=("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": Template(
        begin="<|begin_of_text|>",
        frames={
            role: Frame(f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")
            for role in ("system", "user", "assistant")
        },
        knows=("<|start_header_id|>", "<|eot_id|>"),
    ),
    "vicuna": Template(
        begin="<s>",
        frames={"system": Frame("", " "), "user": Frame("USER: ", " "), "assistant": Frame("ASSISTANT: ", "</s>")},
        greeting="A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
        knows=("<s>", "</s>"),
    ),
    "plain": Template(
        frames={"system": Frame("", "\n"), "user": Frame("", "\n"), "assistant": Frame("", "{end}")},
    ),
}


def choose_template(name: str, tokenizer: Tokenizer) -> str:
    """Return `name`, or for `auto` the first template whose tokens the tokenizer has; `plain` asks for none."""
    if name != "auto":
        return name
    return next(
        each
        for each, template in TEMPLATES.items()
        if all(tokenizer.special(token) is not None for token in template.knows)
    )
