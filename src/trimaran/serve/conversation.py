"""A conversation with a trained model: turns become the tokens that its training data would have."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from trimaran.core import ImageRules, UserError
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.raw_sample import Turn
from trimaran.data.samples.tokenize_chat import ChatTokenizer
from trimaran.data.text.tokenizer import Tokenizer
from trimaran.serve.image_prompt import PromptImage, parts_with_images, place_images, read_image
from trimaran.serve.trained_model import TrainedModel
from trimaran.train.generation.generate import Generation
from trimaran.train.generation.sampling import TokenSampler

MAX_TOKENS = 1 << 30  # nothing is truncated here: a prompt that is too long is refused


class PromptRules(Protocol):
    """What a prompt depends on: a TrainedModel, or the same without a network."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def rules(self) -> ImageRules | None: ...

    @property
    def template(self) -> str: ...


class PromptBuilder:
    """Makes prompts for one model: texts to continue, and conversations to answer; both with images."""

    def __init__(self, trained: PromptRules) -> None:
        self._trained, self._tokenizer = trained, trained.tokenizer
        self.chat = ChatTokenizer(trained.tokenizer, trained.template, trained.rules, MAX_TOKENS)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an answer: the model's own, and the template's end of a turn."""
        return self._trained.stop_ids | self.chat.end_of_turn

    def read_images(self, files: Sequence[Path]) -> list[PromptImage]:
        """Return the images in `files`. Raises if the model does not see."""
        if files and self._trained.rules is None:
            raise UserError("A031", "this model takes no images", where="--image",
                            fix="leave --image out, or name a vision-language model")  # fmt: skip
        return [read_image(file, self._trained.rules) for file in files if self._trained.rules is not None]

    def text_ids(self, text: str, num_images: int) -> np.ndarray:
        """Return the ids of a text to continue, in which an image is one token. An empty one is the end of another."""
        if not text and not num_images and not self._tokenizer.begin_ids:
            return np.array([self._tokenizer.end_id], dtype=np.int64)
        parts = [self.chat.image_ids if part is None else self._tokenizer.encode(part)
                 for part in parts_with_images(text, num_images)]  # fmt: skip
        return np.concatenate([np.array(self._tokenizer.begin_ids), *parts]).astype(np.int64)

    def chat_ids(self, turns: Sequence[Turn]) -> np.ndarray:
        """Return the ids of a conversation up to the beginning of the answer, in which an image is one token."""
        try:
            return self.chat.prompt(turns)
        except BadSampleError as error:
            raise UserError("A001", f"the conversation cannot be written: {error}", where="--chat",
                            fix="change the text, or the model's chat template") from None  # fmt: skip


def continuation(
    trained: TrainedModel, prompt: str, images: Sequence[Path], sampler: TokenSampler, *, max_tokens: int
) -> Generation:
    """Return the text that follows `prompt`, to iterate over.

    Text without images may become longer than the model's positions: its beginning is forgotten then.
    """
    builder = PromptBuilder(trained)
    read = builder.read_images(images)
    ids, placed = place_images(builder.text_ids(prompt, len(read)), read, trained.rules)
    if placed:
        refuse_long_prompt(trained, len(ids))
    sequence = trained.new_sequence()
    sequence.set_images(placed)
    generation = Generation(sequence.next_token, ids, sampler, max_tokens=max_tokens)
    generation.stop_ids, generation.slides = trained.stop_ids, not placed
    return generation


class Conversation:
    """Turns of a user and a model. What both said stays in the cache, so that only a new turn is computed."""

    def __init__(self, trained: TrainedModel, *, system: str = "") -> None:
        self._trained, self._builder, self._sequence = trained, PromptBuilder(trained), trained.new_sequence()
        self._turns = [Turn("system", (system,))] if system else []
        self._images: list[PromptImage] = []

    def ask(self, text: str, images: Sequence[Path], sampler: TokenSampler, *, max_tokens: int) -> Generation:
        """Return the answer to a user's turn, to iterate over. Call `add_answer` with its text afterwards.

        A turn that cannot be asked, such as one with an unreadable image, leaves the conversation as it was.
        """
        new = self._builder.read_images(images)
        turn = Turn("user", tuple(parts_with_images(text, len(new))))
        ids, placed = place_images(self._builder.chat_ids([*self._turns, turn]), [*self._images, *new],
                                   self._trained.rules)  # fmt: skip
        refuse_long_prompt(self._trained, len(ids))
        self._turns, self._images = [*self._turns, turn], [*self._images, *new]
        self._sequence.set_images(placed)
        generation = Generation(self._sequence.next_token, ids, sampler, max_tokens=max_tokens)
        generation.stop_ids, generation.slides = self._builder.stop_ids, False
        return generation

    def add_answer(self, text: str) -> None:
        """Add what the model said, so that later turns follow it."""
        self._turns.append(Turn("assistant", (text,)))


def refuse_long_prompt(trained: TrainedModel, length: int) -> None:
    """Raise if a prompt has more tokens than the model has positions."""
    if length > trained.network.max_seq_len:
        positions = trained.network.max_seq_len
        raise UserError("A032", f"the prompt has {length} tokens, and the model {positions} positions",
                        where="the prompt", fix="shorten it, use fewer or smaller images, or start a new conversation"
                        )  # fmt: skip
