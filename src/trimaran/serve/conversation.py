"""Prompts and texts: a text to continue, or a conversation, with its images; and token ids to text, as they come."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimaran.core import ImageRules, UserError, read_regular_bytes
from trimaran.data import (
    MARKER,
    BadImageError,
    BadSampleError,
    ChatTokenizer,
    SamplePacker,
    SampleRecord,
    Tokenizer,
    Turn,
    fill_patches,
    upright_size,
)
from trimaran.serve.trained_model import ModelTexts, TrainedModel
from trimaran.train import Generation, PlacedImage, TokenSampler

MAX_TOKENS = 1 << 30  # nothing is truncated here: a prompt that is too long is refused


@dataclass(frozen=True, slots=True)
class PromptImage:
    """The patches of one image, u8 [P, values], and its width and height."""

    patches: np.ndarray
    size: tuple[int, int]


def decode_image(data: bytes, rules: ImageRules) -> PromptImage:
    """Return the patches of an encoded image. Raises BadImageError if it cannot be decoded."""
    size = upright_size(data)
    packer = SamplePacker(rules, limit=1 << 30)
    grids = packer.blank(0, np.array([size])).grids[0]
    patches = np.empty((int(grids.prod(1).sum()), 3 * rules.patch**2), dtype=np.uint8)
    fill_patches(data, size, rules, patches)
    return PromptImage(patches, size)


def parts_with_images(text: str, num_images: int) -> list[str | None]:
    """Return a text as parts; None is an image. `<image>` in the text is one; without it images come first."""
    if not num_images or MARKER not in text:
        return [*[None] * num_images, text]
    texts = text.split(MARKER)
    if len(texts) - 1 != num_images:
        raise UserError(
            "A001.text-times-images", where="--image", num_texts=len(texts) - 1, marker=MARKER, num_images=num_images
        )
    return [part for each in texts for part in (each, None)][:-1]


def place_images(
    ids: np.ndarray, images: Sequence[PromptImage], rules: ImageRules | None
) -> tuple[list[int], list[PlacedImage]]:
    """Return `ids`, in which an image is one token, with all tokens of each image, and where the images are."""
    if rules is None or not images:
        return ids.tolist(), []
    sizes = np.array([each.size for each in images], dtype=np.int64).reshape(-1, 2)
    record = SampleRecord(ids, np.zeros(len(ids), dtype=bool), range(0), 0)  # without targets
    sample = SamplePacker(rules, limit=1 << 30).pack(record, sizes)
    if sample.layouts:
        raise UserError("M077.generation-not-arrange", where="--image")
    placed = [
        PlacedImage(image.patches, grids, first, rules.merge)
        for image, grids, first in zip(images, sample.grids, sample.image_starts, strict=True)
    ]
    return sample.tokens.tolist(), placed


class PromptBuilder:
    """Makes prompts for one model: texts to continue, and conversations to answer; both with images."""

    def __init__(self, trained: ModelTexts) -> None:
        self._trained, self._tokenizer = trained, trained.tokenizer
        self.chat = ChatTokenizer(trained.tokenizer, trained.template, trained.rules, MAX_TOKENS)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an answer: the model's own, and the template's end of a turn."""
        return self._trained.stop_ids | self.chat.end_of_turn

    def read_images(self, files: Sequence[Path]) -> list[PromptImage]:
        rules = self._trained.rules
        if files and rules is None:
            raise UserError("A031.model-takes", where="--image")
        images = []
        for file in files:
            assert rules is not None
            try:
                images.append(decode_image(read_regular_bytes(file, follow_links=True), rules))
            except OSError as error:
                raise UserError("A030.image-cannot-read", where=f"--image {file}", reason=error.strerror) from None
            except BadImageError as error:
                raise UserError("A030.not-image", where=f"--image {file}", error=error) from None
        return images

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
            raise UserError("A001.conversation-cannot-written", where="--chat", error=error) from None


def continuation(
    trained: TrainedModel, prompt: str, images: Sequence[Path], sampler: TokenSampler, *, max_tokens: int
) -> Generation:
    """Return the text after `prompt`, to iterate over. Text without images forgets its start if it is too long."""
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
        self._turns.append(Turn("assistant", (text,)))


def refuse_long_prompt(trained: TrainedModel, length: int) -> None:
    if length > trained.network.max_seq_len:
        positions = trained.network.max_seq_len
        raise UserError("A032.prompt-tokens-model", where="the prompt", length=length, positions=positions)


UNDECODABLE = "\ufffd"
MAX_BEFORE = 8  # tokens of the prompt that the first part is decoded with
MAX_WAITING = 64  # tokens that wait for the rest of a character: one has four bytes, but a token may have no text
MAX_TOGETHER = 32  # tokens that are decoded at once


class TextStream:
    """Decodes ids one by one. The parts, joined, are the decoded text without bytes that are not UTF-8.

    A token may hold a part of a character, and the space before a word may depend on the token before it. So each part
    is the difference of two decoded texts that start a few tokens earlier; one that ends inside a character waits, but
    not for more than `MAX_WAITING` tokens: each of them would decode all that wait again.
    """

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()) -> None:
        """`before` are ids that were shown already, such as those of the prompt."""
        self._tokenizer = tokenizer
        self._ids = list(before)
        self._start, self._shown = max(0, len(self._ids) - MAX_BEFORE), len(self._ids)
        self.num_undecodable = 0

    def add(self, *tokens: int) -> str:
        """Return the text that these tokens complete; the rest waits. It is the same as if they came one by one."""
        starts = range(0, len(tokens), MAX_TOGETHER)
        return "".join(self._add_few(tokens[start : start + MAX_TOGETHER]) for start in starts)

    def finish(self) -> str:
        """Return the rest of the text. Bytes of a character that was never completed are left out."""
        return self._shown_part(self._tokenizer.decode(self._ids[self._start :]))

    def _add_few(self, tokens: Sequence[int]) -> str:
        self._ids += tokens
        num_waiting, text = len(self._ids) - self._shown, self._tokenizer.decode(self._ids[self._start :])
        if num_waiting <= MAX_WAITING and not text.endswith(UNDECODABLE):
            return self._shown_part(text)
        if len(tokens) == 1:
            return self._shown_part(text) if num_waiting > MAX_WAITING else ""
        del self._ids[-len(tokens) :]
        return "".join(self._add_few([each]) for each in tokens)

    def _shown_part(self, text: str) -> str:
        """Return what `text` has after what was shown. All of it is shown now."""
        part = text[len(self._tokenizer.decode(self._ids[self._start : self._shown])) :]
        self._start, self._shown = self._shown, len(self._ids)
        self.num_undecodable += part.count(UNDECODABLE)
        return part.replace(UNDECODABLE, "")
