"""From what was said to tokens, and to which of them are to be predicted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np

from trimaran.core import ImageRules, UserError
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.chat_templates import SPECIAL, TEMPLATES, choose_template
from trimaran.data.samples.raw_sample import RawSample, Turn
from trimaran.data.samples.source_part import Spelled
from trimaran.data.tokenizer import ByteTokenizer, Tokenizer

IMAGE_TOKENS = ("<|image_pad|>", "<image>", "<IMG_CONTEXT>", "<|image|>")
SHORT = 4096
SIGHTLESS = "it has an image, and the model takes none"
ALIKE = (np.zeros(SHORT, dtype=bool), np.ones(SHORT, dtype=bool))
AROUND = {"<|image_pad|>": ("<|vision_start|>", "<|vision_end|>"), "<IMG_CONTEXT>": ("<img>", "</img>")}


Run = list[tuple[str, bool]] | tuple[np.ndarray, bool]


@dataclass(slots=True)
class Script:
    """A sample as runs of text and of fixed tokens, in order. A run of text is tokenized as one, like it is read."""

    runs: list[Run] = field(default_factory=list)

    def say(self, text: str, learnt: bool) -> None:
        if not text:
            return
        if self.runs and isinstance(self.runs[-1], list):
            self.runs[-1].append((text, learnt))
        else:
            self.runs.append([(text, learnt)])

    def put(self, ids: np.ndarray, learnt: bool) -> None:
        if ids.size:
            self.runs.append((ids, learnt))


class ChatTokenizer:
    """Writes samples in the tokens of one tokenizer and template. Documents are cut into pieces of `longest` tokens.

    Neighbouring pieces share a token, the last target of the first and the first input of the second.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, rules: ImageRules | None, longest: int) -> None:
        self.tokenizer, self._longest = tokenizer, longest
        self.template = choose_template(template, tokenizer)
        self._template = TEMPLATES[self.template]
        self._image = None if rules is None else _image_ids(tokenizer, rules)
        self._image_token = None if rules is None else rules.image_token
        self._pieces: dict[str, list[str | np.ndarray]] = {}
        structure = [self._fixed(text) for text in self._structural_texts()]
        ids = [
            tokenizer.end_id,
            *(int(piece[0]) for pieces in structure for piece in pieces if not isinstance(piece, str)),
        ]
        self._reserved = np.unique(np.concatenate([ids, self.image_ids]).astype(np.int64))
        self._coordinator_only = isinstance(tokenizer, ByteTokenizer)  # no text becomes one of its special tokens
        self.vocab_size = max(tokenizer.vocab_size, int(self._reserved[-1]) + 1)

    @property
    def image_ids(self) -> np.ndarray:
        """What an image is in the text: its token, and what stands around it."""
        return np.empty(0, dtype=np.int64) if self._image is None else self._image

    def spell(self, batch: Sequence[RawSample]) -> list[list[Spelled] | BadSampleError]:
        """Return the tokens of each sample, or why it has none. Images are left for the caller to add."""
        scripts: list[Script | BadSampleError] = []
        for found in batch:
            try:
                scripts.append(self._script(found))
            except BadSampleError as error:
                scripts.append(error)
        encoded = self._encode([run for script in scripts if isinstance(script, Script) for run in script.runs])
        spelled: list[list[Spelled] | BadSampleError] = []
        for found, script in zip(batch, scripts, strict=True):
            if isinstance(script, BadSampleError):
                spelled.append(script)
                continue
            parts = list(islice(encoded, len(script.runs)))
            tokens = np.concatenate([ids for ids, _ in parts], dtype=np.int64)
            targets = np.concatenate([learnt for _, learnt in parts])
            spelled.append(self._checked(tokens, targets, len(found.images)))
        return spelled

    def _checked(self, tokens: np.ndarray, targets: np.ndarray, images: int) -> list[Spelled] | BadSampleError:
        if self._image_token is not None and np.count_nonzero(tokens == self._image_token) != images:
            return BadSampleError("the text holds the token of an image, and no image is there for it")
        if not targets[1:].any():
            return BadSampleError("there is nothing in it to learn: no token to be predicted")
        if len(tokens) <= self._longest or not targets.all():
            return [Spelled(tokens, targets)]
        starts = range(0, len(tokens) - 1, self._longest - 1)
        return [Spelled(tokens[at : at + self._longest], targets[at : at + self._longest]) for at in starts]

    def _script(self, found: RawSample) -> Script:
        script, template = Script(), self._template
        if found.images and self._image is None:
            raise BadSampleError(SIGHTLESS)
        if found.turns[0].role == "text":
            self._write(script, found.turns[0])
            script.put(np.array([self.tokenizer.end_id]), learnt=True)
            return script
        self._put(script, template.begin)
        if template.greeting and found.turns[0].role != "system":
            self._write(script, Turn("system", (template.greeting,)))
        for turn in found.turns:
            self._write(script, turn)
        return script

    def _write(self, script: Script, turn: Turn) -> None:
        frame, learnt = self._template.frames.get(turn.role), turn.role in ("assistant", "text")
        if frame is not None:
            self._put(script, frame.before)
        for part in turn.parts:
            if part is None:
                script.put(self.image_ids, learnt=False)
            else:
                script.say(_sound(part), learnt)
        if frame is not None:
            self._put(script, frame.end, learnt)
            self._put(script, frame.after)

    def _put(self, script: Script, text: str, learnt: bool = False) -> None:
        for piece in self._fixed(text):
            script.say(piece, learnt) if isinstance(piece, str) else script.put(piece, learnt)

    def _fixed(self, text: str) -> list[str | np.ndarray]:
        """Return a text of the template as its special tokens and what stands between them."""
        if text not in self._pieces:
            pieces: list[str | np.ndarray] = []
            for piece in filter(None, SPECIAL.split(text)):
                token = self.tokenizer.end_id if piece == "{end}" else self.tokenizer.special(piece)
                pieces.append(piece if token is None else np.array([token]))
            self._pieces[text] = pieces
        return self._pieces[text]

    def _structural_texts(self) -> Iterator[str]:
        yield self._template.begin
        for frame in self._template.frames.values():
            yield from (frame.before, frame.end, frame.after)

    def _encode(self, runs: Sequence[Run]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the ids of each run and which are learnt: those with a letter of what is to be learnt in them."""
        texts = {id(run): "".join(text for text, _ in run) for run in runs if isinstance(run, list)}
        mixed = [run for run in runs if isinstance(run, list) and len({learnt for _, learnt in run}) > 1]
        spans = iter(self._spans([texts[id(run)] for run in mixed]))
        alike = texts.keys() - {id(run) for run in mixed}
        plain = self._plain(list(dict.fromkeys(texts[each] for each in texts if each in alike)))
        for run in runs:
            if not isinstance(run, list):
                yield run[0], _flags(run[1], len(run[0]))
            elif id(run) in alike:
                ids = plain[texts[id(run)]]
                yield ids, _flags(run[0][1], len(ids))
            else:
                ids, where = next(spans)
                coordinator = np.repeat([learnt for _, learnt in run], [len(text) for text, _ in run])
                before = np.concatenate([[0], np.cumsum(coordinator)])
                yield ids, before[where[:, 1]] > before[where[:, 0]]

    def _plain(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the ids of each text, none of them a token that only we may write."""
        encoded = self.tokenizer.encode_plain(texts)
        found = dict(zip(texts, encoded, strict=True))
        for number in self._smuggled(encoded):
            ((ids, _),) = self._spans([texts[number]])
            found[texts[number]] = ids
        return found

    def _spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids and spans of each text, none of them a token that only we may write."""
        encoded = self.tokenizer.encode_spans(texts)
        for number in self._smuggled([ids for ids, _ in encoded]):
            ids, spans = encoded[number]
            encoded[number] = self._broken(texts[number], spans[np.isin(ids, self._reserved), 0])
        return encoded

    def _smuggled(self, encoded: Sequence[np.ndarray]) -> list[int]:
        """Return which of the texts have become a token that only we may write."""
        if not encoded or self._coordinator_only:
            return []
        ends = np.cumsum([len(ids) for ids in encoded])
        places = np.flatnonzero(np.isin(np.concatenate(encoded), self._reserved))
        return np.unique(np.searchsorted(ends, places, side="right")).tolist()

    def _broken(self, text: str, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and spans of a text that is cut behind the first letter of what would become a special token."""
        cuts = [0, *np.unique(starts + 1).tolist(), len(text)]
        pieces = self.tokenizer.encode_spans([text[low:high] for low, high in pairwise(cuts)])
        ids = np.concatenate([each for each, _ in pieces])
        return ids, np.concatenate([spans + low for (_, spans), low in zip(pieces, cuts, strict=False)])


def _flags(learnt: bool, length: int) -> np.ndarray:
    """Return `learnt` as often as there are tokens."""
    return ALIKE[learnt][:length] if length <= SHORT else np.full(length, learnt)


def _sound(text: str) -> str:
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        raise BadSampleError("half of a surrogate pair in the text, which is not text") from None
    return text


def _image_ids(tokenizer: Tokenizer, rules: ImageRules) -> np.ndarray:
    """Return the tokens of one image: what `rules` say, or around its token what the tokenizer has for it."""
    name = next((each for each in IMAGE_TOKENS if tokenizer.special(each) is not None), None)
    if (word := tokenizer.word(rules.image_token)) is not None or rules.image_token == tokenizer.end_id:
        known = f": {name} is {tokenizer.special(name)}" if name else " that is no word of it"
        raise UserError("T036", f"token {rules.image_token} stands for an image, but in this tokenizer it is "
                        f"{'the end of a document' if word is None else repr(word)}", where="data.tokenizer",
                        fix=f"set model.shape.image_token to an id{known}")  # fmt: skip
    before, after = rules.before, rules.after
    if name in AROUND and not (before or after) and tokenizer.special(name) == rules.image_token:
        around = [tokenizer.special(each) for each in AROUND[name]]
        if None not in around:
            before, after = ((each,) for each in around)
    return np.array([*before, rules.image_token, *after], dtype=np.int64)
