"""Turns the texts, messages and images of requests into prompts. Runs in one thread beside the event loop."""

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trimaran.core import UserError
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.raw_sample import Role, Turn
from trimaran.data.vision.decode import BadImageError
from trimaran.serve.conversation import PromptBuilder
from trimaran.serve.engine.engine_messages import EngineLimits
from trimaran.serve.image_prompt import PromptImage, decode_image, place_images
from trimaran.serve.open_weights import ModelTexts
from trimaran.serve.server.call_fields import ChatMessage, ContentPart
from trimaran.train.generation.next_token import PlacedImage

DATA_URL = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w=.+-]+)*;base64,(?P<data>[A-Za-z0-9+/=\s]*)", re.ASCII)
PART_CHARACTERS = 1 << 14  # of a long text, tokenised at a time until it is clear that it cannot fit
# Tokens by which the parts of a text may be too long, and an eighth: they have more than the text as a whole.
ROOM = 1 << 10
ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """The tokens of a prompt, with all tokens of each image; `stop_ids` end its answer."""

    ids: tuple[int, ...]
    stop_ids: frozenset[int]
    images: tuple[PlacedImage, ...] = ()


def longest_prompt(limits: EngineLimits) -> int:
    """Return how many tokens a prompt may have: the model's positions, if the cache has pages for so many."""
    return min(limits.max_length, limits.num_pages * limits.page_size)


class PromptReader:
    """Makes prompts for one model. Not safe for several threads: tokenizers have state."""

    def __init__(self, texts: ModelTexts) -> None:
        self._texts, self._builder = texts, PromptBuilder(texts)

    def refuse_much_too_long(self, texts: Sequence[str], limits: EngineLimits, *, where: str) -> None:
        """Raise UserError if the texts of a prompt are far too long, having tokenised little more than fits of them."""
        size, longest = sum(map(len, texts)), longest_prompt(limits)
        if size <= max(PART_CHARACTERS, longest):
            return
        num_tokens = 0
        for text in texts:
            for start in range(0, len(text), PART_CHARACTERS):
                num_tokens += len(self._texts.tokenizer.encode(text[start : start + PART_CHARACTERS]))
                if num_tokens > longest + longest // 8 + ROOM:
                    raise UserError("U003", f"the prompt has {size:,} characters, and at most {longest} tokens fit",
                                    where=where, fix="shorten it")  # fmt: skip

    def read_text(self, prompt: str | Sequence[int], *, vocabulary: int, where: str) -> PreparedPrompt:
        """Return the prompt of a text to continue, or of token ids as they are."""
        if isinstance(prompt, str):
            ids = self._builder.text_ids(prompt, 0).tolist()
        else:
            ids = list(prompt)
            if not ids:
                raise UserError("U001", "the prompt has no tokens", where=where, fix="send at least one token id")
            if max(ids) >= vocabulary:
                raise UserError("U001", f"the model has no token {max(ids)}: its vocabulary has {vocabulary}",
                                where=where, fix="send ids of this model's tokenizer")  # fmt: skip
        return PreparedPrompt(tuple(ids), self._texts.stop_ids)

    def read_chat(self, messages: Sequence[ChatMessage]) -> PreparedPrompt:
        """Return the prompt of a conversation up to the beginning of the answer."""
        images: list[PromptImage] = []
        turns = [self._turn(message, number, images) for number, message in enumerate(messages)]
        try:
            ids = self._builder.chat.prompt(turns)
        except BadSampleError as error:
            raise UserError("U001", f"the conversation cannot be written: {error}", where="messages",
                            fix="change the messages, or serve a model with another chat template"
                            ) from None  # fmt: skip
        placed_ids, placed = place_images(ids, images, self._texts.rules)
        return PreparedPrompt(tuple(placed_ids), self._builder.stop_ids, tuple(placed))

    @staticmethod
    def texts_of(messages: Sequence[ChatMessage]) -> Iterator[str]:
        """Yield the texts of a conversation, without those of images."""
        for message in messages:
            if isinstance(message.content, str):
                yield message.content
            else:
                yield from (part.text or "" for part in message.content)

    def _turn(self, message: ChatMessage, number: int, images: list[PromptImage]) -> Turn:
        role, where = ROLES[message.role], f"messages.{number}.content"
        if isinstance(message.content, str):
            return Turn(role, (message.content,))
        parts: list[str | None] = []
        for place, part in enumerate(message.content):
            if part.type == "text":
                parts.append(part.text or "")
            else:
                images.append(self._image(part, f"{where}.{place}"))
                parts.append(None)
        return Turn(role, tuple(parts))

    def _image(self, part: ContentPart, where: str) -> PromptImage:
        if self._texts.rules is None:
            raise UserError("U004", "this model takes no images", where=where,
                            fix="leave the image out, or serve a vision-language model")  # fmt: skip
        url = part.image_url.url if part.image_url else ""
        match = DATA_URL.fullmatch(url)
        if match is None:
            raise UserError("U004", "the server fetches no images: only data URLs are read", where=where,
                            fix="send data:image/png;base64, and the bytes of the file in base64")  # fmt: skip
        try:
            return decode_image(base64.b64decode(match["data"], validate=False), self._texts.rules)
        except (BadImageError, binascii.Error) as error:
            raise UserError("U004", f"this is not an image that can be used: {error}", where=where,
                            fix="send a JPEG, PNG, WebP, GIF, BMP, TIFF, PPM or AVIF file") from None  # fmt: skip
