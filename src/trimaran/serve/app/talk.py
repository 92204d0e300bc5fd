"""A trained model on the terminal: one text, one answer, or a conversation."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from trimaran.app.show.terminal import raw_stream
from trimaran.core import UserError
from trimaran.serve.app.generated_text import GeneratedText, show_generation
from trimaran.serve.conversation import Conversation, continuation
from trimaran.serve.trained_model import TrainedModel
from trimaran.train.generation.sampling import Sampling, TokenSampler

with suppress(ImportError):  # not every Python has it; then lines cannot be edited
    import readline  # noqa: F401

EXIT_WORDS = ("/exit", "/quit")
HELP = "Ctrl-C ends an answer; /exit, Ctrl-D, or Ctrl-C here ends the conversation"
PROMPT = "> "


def continue_text(
    trained: TrainedModel, sampling: Sampling, prompt: str, *, images: Sequence[Path], max_tokens: int,
    shown: TextIO | None
) -> GeneratedText:  # fmt: skip
    """Return the continuation of a text. The text and then the continuation are written to `shown`."""
    generation = continuation(trained, prompt, images, TokenSampler(sampling), max_tokens=max_tokens)
    if shown is not None:
        shown.write(prompt)
        shown.flush()
    return _shown(show_generation(generation, trained.tokenizer, shown), shown)


def answer_once(
    trained: TrainedModel, sampling: Sampling, question: str, *, system: str, images: Sequence[Path],
    max_tokens: int, shown: TextIO | None
) -> GeneratedText:  # fmt: skip
    """Return the answer to one question, written to `shown` as it comes."""
    conversation = Conversation(trained, system=system)
    generation = conversation.ask(question, images, TokenSampler(sampling), max_tokens=max_tokens)
    return _shown(show_generation(generation, trained.tokenizer, shown), shown)


def talk(trained: TrainedModel, sampling: Sampling, *, system: str, images: Sequence[Path], max_tokens: int) -> int:
    """Talk with the user until they end it. `images` belong to the first question. Returns the exit code.

    Each answer has its own seed, so that a repeated question may get another answer. What the user writes comes from
    standard input, which need not be a terminal.
    """
    conversation, waiting = Conversation(trained, system=system), list(images)
    if sys.stdin.isatty():
        sys.stderr.write(f"{HELP}\n")
    number = 0
    while (question := _read_line()) is not None and question.strip() not in EXIT_WORDS:
        if not question.strip():
            continue
        sampler = TokenSampler(replace(sampling, seed=(sampling.seed + number) % 2**63))
        try:
            generation = conversation.ask(question, waiting, sampler, max_tokens=max_tokens)
        except UserError as error:
            if not sys.stdin.isatty():
                raise
            sys.stderr.write(f"{error}\n")
            continue
        answer = _shown(show_generation(generation, trained.tokenizer, sys.stdout), sys.stdout)
        conversation.add_answer(answer.text)
        waiting, number = [], number + 1
    return 0


def _shown(result: GeneratedText, shown: TextIO | None) -> GeneratedText:
    """Write the end of a shown text, and a remark if there is one."""
    if shown is not None:
        shown.write("\n")
        shown.flush()
    if result.remark:
        sys.stderr.write(f"({result.remark})\n")
    return result


def _read_line() -> str | None:
    """Return what the user writes next; None when they end the conversation."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    cleaned, sys.stdout = sys.stdout, raw_stream(sys.stdout)  # the line editor works only on the terminal itself
    try:
        return input(PROMPT)
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    finally:
        sys.stdout = cleaned
