"""Shows one sample as text, with what is learnt from marked."""

from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from trimaran.data import TokenShards
from trimaran.data.samples.sample_index import SampleIndex
from trimaran.data.text.tokenizer import Tokenizer

MAX_TOKENS = 1500  # of a sample that is shown
MAX_TEXT_TOKENS = 200  # of a document that is shown
LEARNT_STYLE = "bold black on green"
BEGIN_MARK, END_MARK = "\u27e6", "\u27e7"  # white square brackets, without colours


def first_sample(index: SampleIndex, template: str) -> dict[str, Any]:
    """Return the first conversation of the index, or else its first sample, as text with spans."""
    chats = (each for each in range(min(index.num_samples, 1000)) if not index.sample(each).targets.all())
    number = next(chats, 0)
    record = index.sample(number)
    facts = _spans(index.tokenizer, record.tokens, record.targets, MAX_TOKENS)
    return {"origin": index.origin(number), "template": template, "images": len(record.images), **facts}


def first_document(shards: TokenShards) -> dict[str, Any]:
    """Return the beginning of the first document as text with spans. Everything but its first token is learnt."""
    tokens = shards.tokens(0, min(MAX_TEXT_TOKENS, shards.num_tokens))
    targets = np.ones(len(tokens), dtype=bool)
    targets[0] = False
    return {"origin": str(shards.path), "template": None, "images": 0} | _spans(
        shards.tokenizer, tokens, targets, MAX_TEXT_TOKENS
    )


def _spans(tokenizer: Tokenizer, tokens: np.ndarray, targets: np.ndarray, most: int) -> dict[str, Any]:
    """Return the text of the first tokens, and the character spans that are learnt and those that are not."""
    spans, text, stop = [], "", 0
    for learnt, group in groupby(targets[:most].tolist()):
        stop += len(list(group))
        longer = tokenizer.decode_all(tokens[:stop].tolist())  # the end of a text decides how its beginning is decoded
        spans.append({"start": len(text), "stop": len(longer), "learnt": learnt})
        text = longer
    counts = {"tokens": len(tokens), "learnt_tokens": int(targets.sum()), "shown_tokens": stop}
    return {"text": text, "spans": spans, **counts}


def show_sample(sample: dict[str, Any], console: Console) -> None:
    """Print the sample: what is learnt from in colour, or between brackets where there are no colours."""
    has_colours = console.color_system is not None
    how = "on green" if has_colours else f"between {BEGIN_MARK} and {END_MARK}"
    title = f", {sample['learnt_tokens']:,} of {sample['tokens']:,} tokens are learnt from ({how})"
    template = f", written with the chat template {sample['template']}" if sample["template"] else ""
    console.print(Text.assemble("\n", ("one sample", "bold"), title, template), soft_wrap=True)
    console.print(Text(f"{sample['origin']}"), soft_wrap=True, style="dim")
    shown = Text()
    for span in sample["spans"]:
        part = sample["text"][span["start"] : span["stop"]]
        if not span["learnt"]:
            shown.append(part)
        elif has_colours:
            shown.append(part, LEARNT_STYLE)
        else:
            shown.append(f"{BEGIN_MARK}{part}{END_MARK}")
    if sample["shown_tokens"] < sample["tokens"]:
        shown.append(f" ... {sample['tokens'] - sample['shown_tokens']:,} more tokens", "dim")
    console.print(shown, soft_wrap=True)
