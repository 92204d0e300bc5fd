"""Tokenizes conversations and texts, and marks which tokens are targets."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np

from trimaran.core import ImageRules, UserError
from trimaran.data import lazy_import
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.raw_sample import ImageSource, RawSample, SizedImage, Turn, Video
from trimaran.data.samples.source_part import TokenizedSample
from trimaran.data.text.tokenizer import ByteTokenizer, Tokenizer
from trimaran.data.vision.image_grid import ALONE

# Special tokens in the texts below; `{end}` is the tokenizer's end-of-document token.
SPECIAL = re.compile(r"(<\|[a-z_]+\|>|</?s>|\{end\})")
IMAGE_TOKENS = ("<|image_pad|>", "<image>", "<IMG_CONTEXT>", "<|image|>")
# The tokens before and after an image token.
IMAGE_DELIMITERS = {"<|image_pad|>": ("<|vision_start|>", "<|vision_end|>"), "<IMG_CONTEXT>": ("<img>", "</img>")}
NO_IMAGES_REASON = "it has an image, and the model takes no images"
SOME_ANSWER = "the"  # a prompt is what comes before it; a space before this word is a part of its token
CACHED_MASK_TOKENS = 4096
UNIFORM_MASKS = (np.zeros(CACHED_MASK_TOKENS, dtype=bool), np.ones(CACHED_MASK_TOKENS, dtype=bool))
# Text in parts, each with its target flag; or fixed token ids with one target flag.
Segment = list[tuple[str, bool]] | tuple[np.ndarray, bool]


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


TURN_ROLES = ("system", "user", "assistant")
TEMPLATES = {
    "chatml": ChatTemplate(
        turns={role: TurnFormat(f"<|im_start|>{role}\n", "<|im_end|>", "\n") for role in TURN_ROLES},
        required_tokens=("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": ChatTemplate(
        begin="<|begin_of_text|>",
        turns={
            role: TurnFormat(f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>") for role in TURN_ROLES
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


if TYPE_CHECKING:
    from trimaran.data.samples.model_template import ModelTemplate


def refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadSampleError("its text contains an unpaired surrogate") from None


@dataclass(slots=True)
class SampleSegments:
    """A sample as segments of text and of fixed tokens, in order. A text segment is tokenized as one string."""

    segments: list[Segment] = field(default_factory=list)

    def add_text(self, text: str, is_target: bool) -> None:
        if not text:
            return
        if self.segments and isinstance(self.segments[-1], list):
            self.segments[-1].append((text, is_target))
        else:
            self.segments.append([(text, is_target)])

    def add_ids(self, ids: np.ndarray, is_target: bool) -> None:
        if ids.size:
            self.segments.append((ids, is_target))


class ChatTokenizer:
    """Tokenizes samples with one tokenizer and one chat template. Documents are split into `max_tokens` tokens.

    Neighbouring parts of a document overlap by one token: the last target of one is the first input of the next.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, rules: ImageRules | None, max_tokens: int) -> None:
        self.tokenizer, self._max_tokens = tokenizer, max_tokens
        # The tokens of one image: its image token and the delimiters around it.
        self.image_ids = np.empty(0, dtype=np.int64) if rules is None else _image_ids(tokenizer, rules)
        self._image_token = None if rules is None else rules.image_token
        self.own_template: ModelTemplate | None = None
        if template == "model":
            content = getattr(tokenizer, "content", None)
            if content is None or not content.templates:
                raise UserError("T024.tokenizer-comes-without", where="data.samples.template: model")
            module = lazy_import.load("samples.model_template", "jinja2", where="data.samples.template")
            self.own_template = module.ModelTemplate(tokenizer, self.image_ids, self._image_token)
        self.template = self.own_template.name if self.own_template else choose_template(template, tokenizer)
        self._template = TEMPLATES["plain" if self.own_template else self.template]  # plain: for documents
        self._split_texts: dict[str, list[str | np.ndarray]] = {}
        turns, ids = self._template.turns.values(), [tokenizer.end_id]
        for text in (self._template.begin, *(text for turn in turns for text in (turn.before, turn.end, turn.after))):
            ids += [int(part[0]) for part in self._split_special(text) if not isinstance(part, str)]
        self._reserved = np.unique(np.concatenate([ids, self.image_ids]).astype(np.int64))
        self.is_named = template != "auto"
        self._is_byte_level = isinstance(tokenizer, ByteTokenizer)  # text never encodes to its special tokens
        self.vocab_size = max(tokenizer.vocab_size, int(self._reserved[-1]) + 1)

    def tokenize(self, batch: Sequence[RawSample]) -> list[list[TokenizedSample] | BadSampleError]:
        """Return the tokens of each sample, or why it has none. The caller adds the images."""
        own: dict[int, list[TokenizedSample] | BadSampleError] = {}  # conversations in the model's template, by id()
        chats = [raw for raw in batch if raw.turns[0].role != "text"]
        for raw, outcome in zip(chats, self.own_template.tokenize(chats), strict=True) if self.own_template else ():
            if raw.images and self._image_token is None:
                outcome = BadSampleError(NO_IMAGES_REASON)
            if isinstance(outcome, BadSampleError):
                own[id(raw)] = outcome
                continue
            checked = [self._checked(tokens.astype(np.int64), targets, count) for tokens, targets, count in outcome]
            bad = next((each for each in checked if isinstance(each, BadSampleError)), None)
            own[id(raw)] = bad or [each for part in checked if isinstance(part, list) for each in part]
        prepared: list[SampleSegments | list[TokenizedSample] | BadSampleError] = []
        for raw in batch:
            try:
                prepared.append(own[id(raw)] if id(raw) in own else self._segments_of(raw))
            except BadSampleError as error:
                prepared.append(error)
        encoded = self._encode(
            [each for some in prepared if isinstance(some, SampleSegments) for each in some.segments]
        )
        tokenized: list[list[TokenizedSample] | BadSampleError] = []
        for raw, sample in zip(batch, prepared, strict=True):
            if not isinstance(sample, SampleSegments):
                tokenized.append(sample)
                continue
            parts = list(islice(encoded, len(sample.segments)))
            tokens = np.concatenate([ids for ids, _ in parts], dtype=np.int64)
            targets = np.concatenate([mask for _, mask in parts])
            tokenized.append(self._checked(tokens, targets, len(raw.images)))
        return tokenized

    def with_images(
        self, sample: TokenizedSample, images: Sequence[ImageSource | Video], sized: Sequence[SizedImage]
    ) -> TokenizedSample:
        """Return a sample with the first of the `images` of its source, of which `sized` has each single one.

        A video has one token for each of its images, between the same delimiters, and the size of its first image.
        """
        is_image = sample.tokens == self._image_token
        parts = images[: int(np.count_nonzero(is_image))]
        repeats = np.ones(len(sample.tokens), dtype=np.int64)
        repeats[is_image] = [len(each.frames) if isinstance(each, Video) else 1 for each in parts]
        rest, own, times = iter(sized), [], []
        for count, part in zip(repeats[is_image].tolist(), parts, strict=True):
            first, *others = islice(rest, count)
            own += [first, *((image, *first[1:]) for image, _, _ in others)]
            times += [ALONE, *(part.positions[1:] if isinstance(part, Video) else ())]
        tokens, targets = np.repeat(sample.tokens, repeats), np.repeat(sample.targets, repeats)
        return TokenizedSample(tokens, targets, tuple(own), tuple(times))

    def prompt(self, turns: Sequence[Turn]) -> np.ndarray:
        """Return the ids of a conversation that the model is to answer, as they come before an answer in training.

        An image is one token, with its delimiters. Raises BadSampleError if the conversation cannot be written.
        """
        if self.own_template is not None:
            return self.own_template.prompt(turns)
        raw = RawSample(file="", row=0, turns=(*turns, Turn("assistant", (SOME_ANSWER,))))
        parts = list(self._encode(self._segments_of(raw).segments))
        targets = np.concatenate([mask for _, mask in parts])
        before = np.flatnonzero(~targets[: np.flatnonzero(targets)[-1]])
        return np.concatenate([ids for ids, _ in parts], dtype=np.int64)[: before[-1] + 1 if len(before) else 0]

    @property
    def end_of_turn(self) -> frozenset[int]:
        """The token that ends an answer; none if the template has no special token for it."""
        if self.own_template is not None:
            return self.own_template.end_of_turn()
        parts = self._split_special(self._template.turns["assistant"].end)
        return frozenset(int(part[0]) for part in parts[:1] if not isinstance(part, str))

    def _checked(
        self, tokens: np.ndarray, targets: np.ndarray, num_images: int
    ) -> list[TokenizedSample] | BadSampleError:
        """Return the sample, split if it is a long document, or why it is bad."""
        if (0 if self._image_token is None else np.count_nonzero(tokens == self._image_token)) != num_images:
            return BadSampleError("its text contains the image token without an image")
        if not targets[1:].any():
            return BadSampleError("it has no targets")
        if len(tokens) <= self._max_tokens or not targets.all():
            return [TokenizedSample(tokens, targets)]
        parts = [slice(at, at + self._max_tokens) for at in range(0, len(tokens) - 1, self._max_tokens - 1)]
        return [TokenizedSample(tokens[part], targets[part]) for part in parts]

    def _segments_of(self, raw: RawSample) -> SampleSegments:
        segments, template = SampleSegments(), self._template
        if raw.images and self._image_token is None:
            raise BadSampleError(NO_IMAGES_REASON)
        if raw.turns[0].role == "text":
            segments.add_ids(np.array(self.tokenizer.begin_ids, dtype=np.int64), is_target=False)
            self._add_turn(segments, raw.turns[0])
            segments.add_ids(np.array([self.tokenizer.end_id]), is_target=True)
            return segments
        if any(turn.fields.get("tool_calls") for turn in raw.turns):
            raise BadSampleError(f"it has tool calls, which the template {self.template} cannot write")
        if raw.tools:
            raise BadSampleError(f"it has tools, which the template {self.template} cannot write")
        self._add_template_text(segments, template.begin)
        if (system := raw.system or template.default_system) and raw.turns[0].role != "system":
            self._add_turn(segments, Turn("system", (system,)))
        for turn in raw.turns:
            self._add_turn(segments, turn)
        return segments

    def _add_turn(self, segments: SampleSegments, turn: Turn) -> None:
        turn_format, is_target = self._template.turns.get(turn.role), turn.is_target
        if turn_format is not None:
            self._add_template_text(segments, turn_format.before)
        for part in turn.parts:
            if part is None:
                segments.add_ids(self.image_ids, is_target=False)
            else:
                refuse_surrogates(part)
                segments.add_text(part, is_target)
        if turn_format is not None:
            self._add_template_text(segments, turn_format.end, is_target)
            self._add_template_text(segments, turn_format.after)

    def _add_template_text(self, segments: SampleSegments, text: str, is_target: bool = False) -> None:
        for part in self._split_special(text):
            segments.add_text(part, is_target) if isinstance(part, str) else segments.add_ids(part, is_target)

    def _split_special(self, text: str) -> list[str | np.ndarray]:
        """Return a text of the template as its special tokens and the text between them."""
        if text not in self._split_texts:
            parts: list[str | np.ndarray] = []
            for part in filter(None, SPECIAL.split(text)):
                token = self.tokenizer.end_id if part == "{end}" else self.tokenizer.special(part)
                parts.append(part if token is None else np.array([token]))
            self._split_texts[text] = parts
        return self._split_texts[text]

    def _encode(self, segments: Sequence[Segment]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the ids of each segment and its target mask. A token is a target if any of its characters is one."""
        texts = {id(each): "".join(text for text, _ in each) for each in segments if isinstance(each, list)}
        mixed = [each for each in segments if isinstance(each, list) and len({flag for _, flag in each}) > 1]
        spans = iter(self._spans([texts[id(each)] for each in mixed]))
        uniform = texts.keys() - {id(each) for each in mixed}
        plain = self._plain(list(dict.fromkeys(texts[each] for each in texts if each in uniform)))
        for segment in segments:
            if not isinstance(segment, list):
                yield segment[0], _uniform_mask(segment[1], len(segment[0]))
            elif id(segment) in uniform:
                ids = plain[texts[id(segment)]]
                yield ids, _uniform_mask(segment[0][1], len(ids))
            else:
                ids, span = next(spans)
                characters = np.repeat([flag for _, flag in segment], [len(text) for text, _ in segment])
                before = np.concatenate([[0], np.cumsum(characters)])
                yield ids, before[span[:, 1]] > before[span[:, 0]]

    def _plain(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the ids of each text, without reserved tokens."""
        encoded = self.tokenizer.encode_plain(texts)
        ids_of = dict(zip(texts, encoded, strict=True))
        for number in self._with_reserved(encoded):
            ids_of[texts[number]] = self._spans([texts[number]])[0][0]
        return ids_of

    def _spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids and character spans of each text, without reserved tokens."""
        encoded = self.tokenizer.encode_spans(texts)
        for number in self._with_reserved([ids for ids, _ in encoded]):
            (ids, spans), text = encoded[number], texts[number]
            # The text is split after the first character of each reserved token.
            cuts = [0, *np.unique(spans[np.isin(ids, self._reserved), 0] + 1).tolist(), len(text)]
            parts = self.tokenizer.encode_spans([text[low:high] for low, high in pairwise(cuts)])
            shifted = [part_spans + low for (_, part_spans), low in zip(parts, cuts, strict=False)]
            encoded[number] = np.concatenate([each for each, _ in parts]), np.concatenate(shifted)
        return encoded

    def _with_reserved(self, encoded: Sequence[np.ndarray]) -> list[int]:
        """Return the numbers of the texts that contain a reserved token: only templates and images may have those."""
        if not encoded or self._is_byte_level:
            return []
        ends = np.cumsum([len(ids) for ids in encoded])
        reserved_at = np.flatnonzero(np.isin(np.concatenate(encoded), self._reserved))
        return np.unique(np.searchsorted(ends, reserved_at, side="right")).tolist()


def _uniform_mask(is_target: bool, length: int) -> np.ndarray:
    """Return a mask of `length` equal values."""
    return UNIFORM_MASKS[is_target][:length] if length <= CACHED_MASK_TOKENS else np.full(length, is_target)


def _image_ids(tokenizer: Tokenizer, rules: ImageRules) -> np.ndarray:
    """Return the tokens of one image: the delimiters of `rules`, or by default those of the tokenizer."""
    name = next((each for each in IMAGE_TOKENS if tokenizer.special(each) is not None), None)
    if (token := tokenizer.ordinary_token(rules.image_token)) is not None or rules.image_token == tokenizer.end_id:
        hint = f": {name} is {tokenizer.special(name)}" if name else " that is not an ordinary token"
        raise UserError(
            "T036.token-image-token",
            where="data.tokenizer",
            image_token=rules.image_token,
            token="the end of a document" if token is None else repr(token),
            hint=hint,
        )
    before, after = rules.before, rules.after
    if name in IMAGE_DELIMITERS and not (before or after) and tokenizer.special(name) == rules.image_token:
        delimiters = [tokenizer.special(each) for each in IMAGE_DELIMITERS[name]]
        if None not in delimiters:
            before, after = ((each,) for each in delimiters)
    return np.array([*before, rules.image_token, *after], dtype=np.int64)
