"""What a model and data are, by their files: family, size and tokenizer; format, number of samples and lengths."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from trimaran.app.recipe.ask_torch import ask_hf_facts
from trimaran.app.recipe.plan_request import family_of
from trimaran.app.recipe.recipe_files import with_local_model
from trimaran.core import DataSection, MixtureSource, ModelSection, Recipe, UserError, show_bytes, show_count, templated
from trimaran.data import SourceFiles, TokenShards
from trimaran.data.row_fields import (
    CONVERSATIONS,
    QUESTIONS,
    answer_fields,
    is_messages,
    learns_rejected,
    preference_error,
)
from trimaran.data.samples.parse_chat import IMAGES, ROLES
from trimaran.data.samples.readers import IMAGE_SUFFIXES, file_rows, read_samples, saved_rows
from trimaran.data.text.source_files import (
    CSV_SUFFIXES,
    JSON_SUFFIXES,
    JSONL_SUFFIXES,
    data_suffix,
    find_files,
    is_saved_dataset,
)
from trimaran.data.text.token_files import TOKEN_SOURCES, count_tokens
from trimaran.data.text.tokenizer import Tokenizer, chat_template_names, has_tokenizer, load_tokenizer
from trimaran.models import (
    hub_repo_of,
    is_hub_name,
    model_folder,
    near_folder,
    outline_if_known,
    repo_name,
    spec_of,
    vision_of,
    weight_files,
)

OWN_FAMILIES = ("vlm", "decoder")  # preferred, because they support every axis
MAX_LISTED = 5000  # files of a folder whose names are looked at
MAX_READ = 2000  # samples
MAX_TOKENIZED = 64  # samples whose text is tokenized, for the ratio of tokens to characters
MAX_TOKENIZED_CHARACTERS = 200_000
TURN_TOKENS = 8  # what a chat template adds to a turn, about
TOOLS_TOKENS = 160  # a template's text about tools, roughly
METADATA_FIELDS = ("id", "uuid", "url", "title", "author", "date", "language", "lang", "license")  # never the text
# Other names of an answer. A row with one of them has a question, too, so neither alone is its text.
ANSWER_FIELDS = ("assistant", "bot", "solution", "target", "targets", "summary", "highlights")
PROSE_WORDS = 3
IN_LIST = "[]"  # after the name of a list of texts
TEXT_SHARE = 0.9  # of the characters of a row, in the field that is taken for its text
USUAL_TEXT_FIELDS = ("text", "content", "document", "body", "code")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model that a recipe can name."""

    named: str  # the person's spelling
    folder: Path  # its path on this machine
    family: str
    name: str
    num_parameters: int | None
    max_seq_len: int
    has_weights: bool
    weight_bytes: int
    tokenizer: Tokenizer | None
    has_chat_template: bool
    takes_images: bool
    image_tokens: int
    mixes_documents: bool = False  # the documents of a packed row would attend to each other

    def describe(self) -> str:
        """Return one line for the person."""
        size = f"{show_count(self.num_parameters)} parameters" if self.num_parameters else "size unknown"
        if self.weight_bytes:
            weights = f"weights of {show_bytes(self.weight_bytes)}"
        else:
            weights = "weights on the Hub" if self.has_weights else "no weights: trained from scratch"
        tokenizer = f"tokenizer of {self.tokenizer.vocab_size:,} ids" if self.tokenizer else "no tokenizer: bytes"
        template = "its own chat template" if self.has_chat_template else "no chat template"
        limit = f"at most {self.max_seq_len:,} tokens" if self.max_seq_len else "no limit of length"
        return f"{self.name}, {size}, {weights}, {tokenizer}, {template}, {limit}"

    def as_dict(self) -> dict[str, Any]:
        names = ("family", "name", "num_parameters", "max_seq_len", "has_weights")
        facts = {"path": self.named} | {name: getattr(self, name) for name in names}
        vocab_size = self.tokenizer.vocab_size if self.tokenizer else None
        return facts | {"vocab_size": vocab_size, "has_chat_template": self.has_chat_template}


def look_at_model(named: str) -> ModelFacts:
    """Return what is known of a model folder or a name on the Hub. Raises UserError if it cannot be trained."""
    recipe = with_local_model(Recipe(model=ModelSection(family="hf", path=named)))
    assert recipe.model.path is not None
    folder = model_folder(recipe.model.path)
    family = family_of(str(folder), OWN_FAMILIES)
    section = ModelSection(family=family, path=str(folder))
    facts, _ = ask_hf_facts(section, os.environ)
    if facts is not None and facts.untrainable is not None:
        raise facts.untrainable
    outline = outline_if_known(section)
    files = weight_files(folder)
    projector = [tower.positions for tower in outline.towers if tower.name == "projector"] if outline else []
    takes_images = vision_of(spec_of(section)) is not None
    return ModelFacts(
        named=named,
        folder=folder,
        family=family,
        name=repo_name(folder),
        num_parameters=outline.num_parameters if outline else None,
        max_seq_len=outline.max_seq_len if outline else 0,
        has_weights=bool(files) or is_hub_name(named) or hub_repo_of(folder) is not None,
        weight_bytes=sum(file.stat().st_size for file in files),
        tokenizer=load_tokenizer(str(folder)) if has_tokenizer(folder) else None,
        has_chat_template=has_tokenizer(folder) and bool(chat_template_names(folder)),
        takes_images=takes_images,
        image_tokens=sum(projector) if takes_images else 0,
        mixes_documents=facts is not None and facts.without_documents is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Data that a recipe can name; lengths are tokens, of samples that were read."""

    named: str  # what the person wrote
    source: str
    text_field: str = "text"
    split: str = "train"
    is_chat: bool = False
    has_images: bool = False
    num_samples: int
    is_exact: bool  # all samples were read, so their number is not an estimate
    num_bad: int = 0
    median_tokens: int
    longest_tokens: int

    @property
    def is_samples(self) -> bool:
        """Whether rows are packed from samples, and not cut from one stream of text."""
        return self.source in ("chat", "webdataset", "parquet", "image-folder")

    @property
    def total_tokens(self) -> int:
        return self.num_samples * max(1, self.median_tokens)

    def describe(self) -> str:
        """Return one line for the person."""
        kind = "conversations" if self.is_chat else "images with text" if self.has_images else "documents"
        about = "" if self.is_exact else "about "
        field = f", field {self.text_field}" if self.text_field != "text" else ""
        bad = f", {self.num_bad} of those read cannot be used" if self.num_bad else ""
        return (
            f"{about}{self.num_samples:,} {kind} ({self.source}{field}), {self.median_tokens:,} tokens each (median), "
            f"the longest read {self.longest_tokens:,}{bad}"
        )

    def as_dict(self) -> dict[str, Any]:
        names = ("source", "text_field", "is_chat", "has_images", "num_samples", "is_exact", "num_bad",
                 "median_tokens", "longest_tokens")  # fmt: skip
        return {"path": self.named} | {name: getattr(self, name) for name in names}


def look_at_data(named: str, folder: Path, tokenizer: Tokenizer | None, *, split: str = "train") -> DataFacts:
    """Return what is known of the data at `folder`, which the person calls `named`. Reads at most 2,000 samples."""
    if not folder.exists():
        near = near_folder(named)
        meant = templated(" (did you mean '{near}'?)", near=near) if near else ""
        raise UserError("T003.not-exist", where="--data", named=named, meant=meant)
    source = _source_by_names(folder)
    if source == "shards" or source in TOKEN_SOURCES:
        section = DataSection(source=source, path=str(folder))
        if source == "shards":
            meta = TokenShards.open(folder).meta
            num_tokens, num_documents = meta.num_tokens, meta.num_documents
        else:
            num_tokens, num_documents = count_tokens(section, find_files(section), tokenizer or load_tokenizer(None))
        length = num_tokens // max(1, num_documents)
        return DataFacts(named=named, source=source, num_samples=num_documents, is_exact=source != "nanogpt",
                         median_tokens=length, longest_tokens=length)  # fmt: skip
    row = _first_row(source, folder)
    if row is not None and learns_rejected(row, ""):
        raise preference_error(str(folder))
    fields, text_field = row or {}, "text"
    is_chat = any(name in fields for name in (*CONVERSATIONS, "texts")) or bool(answer_fields(fields))
    has_images = any(fields.get(name) for name in IMAGES) or source == "image-folder"
    if row is not None and not is_chat:  # a conversation in a field with another name than usual, or inside an object
        names = list(_conversations(row))
        if len(names) > 1:
            raise UserError("T065.several-fields-hold", where=str(folder), names=", ".join(names)[:200])
        is_chat, text_field = bool(names), (names or [text_field])[0]
    if row is not None and not is_chat and source not in ("webdataset", "image-folder") and not has_images:
        text_field = _text_field(row, folder)
    reads_text = not is_chat and not has_images
    if source in ("chat", "parquet") and reads_text:
        files = find_files(DataSection(source="chat", path=str(folder)))
        source = "jsonl" if all(data_suffix(file) in JSONL_SUFFIXES for file in files) else "datasets"
    elif source == "datasets" and not reads_text:
        source = "chat"
    own = MixtureSource.model_validate(
        {"name": "data", "source": source, "path": str(folder), "text_field": text_field}
    )
    files = find_files(DataSection(source=own.source, path=own.path))
    read = list(islice(read_samples(SourceFiles(own, files)), MAX_READ))
    good = [sample for sample in read if sample.bad is None]
    if not good:
        reason = read[0].bad if read else "there is no sample"
        raise UserError("T065.no-sample-data", where=str(folder), reason=reason)
    # The tokens of a sample are its characters, times the ratio in those that were tokenized.
    texts = []
    for sample in good:  # with what its template writes of tools and their calls
        parts = [part for turn in sample.turns for part in turn.parts if part]
        calls = [turn.fields["tool_calls"] for turn in sample.turns if turn.fields.get("tool_calls")]
        parts += [json.dumps(each, ensure_ascii=False) for each in (*sample.tools, *calls)]
        texts.append("".join([sample.system, *parts]))
    ratio = 1.0
    if tokenizer is not None:
        tried = [text[:MAX_TOKENIZED_CHARACTERS] for text in texts[:MAX_TOKENIZED] if text]
        ratio = sum(len(tokenizer.encode(text)) for text in tried) / max(1, sum(map(len, tried)))
    lengths = [
        round(len(text) * ratio)
        + TURN_TOKENS * (len(sample.turns) if sample.turns[0].role != "text" else 0)
        + TOOLS_TOKENS * bool(sample.tools)
        for text, sample in zip(texts, good, strict=True)
    ]
    fraction = read[-1].fraction_read if len(read) == MAX_READ else 1.0
    is_hub = is_hub_name(named)
    return DataFacts(
        named=named,
        source="chat" if is_hub and not reads_text else "datasets" if is_hub else source,
        text_field=text_field,
        split=split,
        is_chat=is_chat or any(turn.role == "assistant" for turn in good[0].turns),
        has_images=has_images or any(sample.images for sample in good),
        num_samples=max(len(read), round(len(read) / max(fraction, 1e-9))),
        is_exact=len(read) < MAX_READ,
        num_bad=len(read) - len(good),
        median_tokens=max(1, round(median(lengths))),
        longest_tokens=max(1, *lengths),
    )


def _source_by_names(path: Path) -> str:
    """Return the source that reads the names of the files: a JSON file may still be text or chat."""
    if is_saved_dataset(path):
        return "datasets"
    if path.is_dir() and (path / "meta.json").is_file() and any(path.glob("shard-*.tokens")):
        return "shards"
    files = [path] if path.is_file() else list(islice(_files(path), MAX_LISTED))
    suffixes = Counter(data_suffix(file).lower() for file in files)
    if not files:
        raise UserError("T005.folder-no-files", where=str(path))
    if suffixes[".bin"] or suffixes[".idx"]:
        has_index = any(file.with_suffix(".idx").is_file() for file in files)
        return "megatron" if has_index else "nanogpt"
    if suffixes[".tar"]:
        return "webdataset"
    if any(suffixes[each] for each in IMAGE_SUFFIXES):
        return "image-folder"
    if suffixes[".parquet"]:
        return "parquet"
    return "chat" if any(suffixes[each] for each in (*JSON_SUFFIXES, *CSV_SUFFIXES)) else "text"


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        yield from (Path(root) / name for name in sorted(names) if not name.startswith("."))


def _first_row(source: str, path: Path) -> Mapping[str, Any] | None:
    """Return the first row of JSON, Parquet, CSV or a saved dataset; None for other sources."""
    rows: Iterator[tuple[int, Any, float]]
    if source == "datasets":
        rows = saved_rows(path)
    elif source in ("chat", "parquet"):
        files = find_files(DataSection(source=source, path=str(path)))
        rows = (row for file in files for row in file_rows(file, lambda position: 0.0))
    else:
        return None
    found = next((row for _, row, _ in islice(rows, MAX_READ) if isinstance(row, Mapping)), None)
    if found is None:
        raise UserError("T065.no-row", where=str(path))
    return found


def _conversations(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _conversations(value, f"{prefix}{name}.")
        elif is_messages(value) and any(
            ROLES.get(str(each.get("from", each.get("role")))) == "assistant" for each in value
        ):
            yield f"{prefix}{name}"


def _text_field(row: Mapping[str, Any], path: Path) -> str:
    """Return the field that holds the text: one of the usual names, or the one with nearly all of the row's text."""
    every = dict(_strings(row))
    strings = {name: text for name, text in every.items() if not name.endswith(IN_LIST)}
    last_names = {name.rpartition(".")[2]: name for name in reversed(strings)}
    if usual := next((last_names[each] for each in USUAL_TEXT_FIELDS if each in last_names), None):
        return usual
    asked_names = {*ANSWER_FIELDS, *(each for pair in QUESTIONS for each in pair)}
    if asked := [name for last, name in last_names.items() if last in asked_names][::-1]:
        raise UserError("T065.looks-like-part", where=str(path), asked=asked[0], row=", ".join(map(str, row))[:200])
    lasts = {name: name.rpartition(".")[2].lower() for name in every}
    named = {name for name, last in lasts.items() if last in METADATA_FIELDS or last.endswith(("_id", "_url"))}
    texts = {name: text for name, text in every.items() if name not in named}
    prose = {name: text for name, text in texts.items() if len(text.split()) >= PROSE_WORDS or not text.isascii()}
    texts = prose or texts
    if not texts:
        raise UserError("T065.no-field-holds", where=str(path), row=", ".join(map(str, row))[:200])
    longest = max(texts, key=lambda name: len(texts[name]))
    if longest not in strings or len(texts[longest]) < TEXT_SHARE * sum(map(len, texts.values())):
        raise UserError("T065.text-not-field", where=str(path), texts=", ".join(texts)[:200])
    return longest


def _strings(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields with text, also those of objects inside the row, `data.text`, and the texts of lists, joined."""
    for name, value in row.items():
        if isinstance(value, str):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _strings(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            texts = [text for each in value for _, text in _strings({"": each})]
            if texts:
                yield f"{prefix}{name}{IN_LIST}", " ".join(texts)
