"""The prompt of the sample at the end of a run: the recipe's, or the beginning of a held-out text."""

import torch.distributed as dist

from trimaran.core.recipe import AUTO_PROMPT, PYTHON_PROMPT
from trimaran.data.loader import Loader
from trimaran.data.tokenizer import Tokenizer
from trimaran.train.build import WorkerParts

MAX_PROMPT_TOKENS = 24
UNDECODABLE = "\ufffd"


def sample_prompt(parts: WorkerParts, tokenizer: Tokenizer) -> str:
    """Return the text that the model continues, the same on every rank. Every rank must call it."""
    recipe, holdout = parts.trainer.recipe, parts.training_data.holdout
    if recipe.train.sample.prompt != AUTO_PROMPT:
        return recipe.train.sample.prompt
    if recipe.data.source == "python-stdlib":
        return PYTHON_PROMPT
    if holdout is None:
        return ""
    with Loader(holdout, steps=1) as loader, parts.trainer.link.section("data"):
        row = next(loader).to(parts.trainer.device).micro(0)["tokens"][0].long().contiguous()
    dist.broadcast(row, 0)  # data-parallel ranks hold different rows
    return document_beginning(row.cpu().tolist(), tokenizer)


def document_beginning(ids: list[int], tokenizer: Tokenizer) -> str:
    """Return the first words of a document in a row of tokens, or of the row if no document begins early in it.

    A row may begin inside a document, and even inside a character. The last word may be cut, so it is left out.
    """
    half = ids[: len(ids) // 2]
    start = half.index(tokenizer.end_id) + 1 if tokenizer.end_id in half else 0
    text = tokenizer.decode(ids[start : start + MAX_PROMPT_TOKENS]).strip(UNDECODABLE)
    if not start and not tokenizer.begin_ids:
        text = text.partition(" ")[2] or text
    words = text.rpartition(" ")[0] or text
    return words.partition(UNDECODABLE)[0]
