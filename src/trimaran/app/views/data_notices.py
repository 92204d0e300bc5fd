"""What a person should know about prepared data: lines that were left out, ignored splits, the chat template."""

from pathlib import Path

from trimaran.core import DataSection, ImageRules, MixtureSource
from trimaran.data.bad_lines import as_notice
from trimaran.data.samples.prepare_samples import sources_of
from trimaran.data.samples.sample_index import SampleIndex
from trimaran.data.samples.tokenize_chat import ChatTokenizer
from trimaran.data.text_sources import ignored_splits
from trimaran.data.token_files import held_out_files
from trimaran.data.token_shards import BAD, TokenShards

TEMPLATE_SOURCES = ("chat", "parquet", "datasets", "webdataset", "shapes")  # may hold conversations


def text_notices(section: DataSection, shards: TokenShards) -> list[str]:
    """Return the notices about packed text."""
    meta, notices = shards.meta, _split_notices(section)
    if meta.num_bad:
        notices.append(as_notice(meta.num_bad, meta.num_lines, shards.bad, str(shards.path / BAD)))
    return notices


def sample_notices(section: DataSection, index: SampleIndex, rules: ImageRules | None) -> list[str]:
    """Return the notices about prepared samples."""
    notices = [notice for source in sources_of(section) for notice in _split_notices(source)]
    if any(source.source in TEMPLATE_SOURCES for source in sources_of(section)):
        notices += _template_notices(ChatTokenizer(index.tokenizer, section.samples.template, rules, section.seq_len))
    return notices


def bad_sample_notices(index: SampleIndex) -> list[str]:
    """Return a notice for each source with bad samples."""
    notices = []
    for source, part in zip(index.source_names, index.parts, strict=True):
        if number := part.meta.num_bad:
            first, total = part.bad[0], number + part.num_samples
            plural = "sample was" if number == 1 else "samples were"
            notices.append(f"{source}: {number:,} bad {plural} left out of {total:,}, such as {first['where']}: "
                           f"{first['reason']}; all are listed in {part.path / BAD}")  # fmt: skip
    return notices


def _split_notices(source: DataSection | MixtureSource) -> list[str]:
    if source.source == "nanogpt" and source.path and Path(source.path).is_dir():
        held_out = held_out_files(sorted(Path(source.path).rglob("*.bin")))
        return [f"{source.path}: {file.name} is not used for training" for file in held_out]
    ignored = ignored_splits(Path(source.path)) if source.source in ("datasets", "chat") and source.path else []
    if not ignored:
        return []
    names = f"split {ignored[0]} is" if len(ignored) == 1 else f"splits {', '.join(ignored)} are"
    return [f"{source.path}: only the split train is read; the {names} not used"]


def _template_notices(chat: ChatTokenizer) -> list[str]:
    own = chat.own_template
    if own is None:
        return [] if chat.is_named else [
            f"the tokenizer has no chat template: conversations are written as {chat.template}; data.samples.template "
            "names another"
        ]  # fmt: skip
    notices = []
    if own.writes_date:
        notices.append("the chat template writes the date: it is always 26 Jul 2024 in training data")
    if not own.ends_turns:
        notices.append("the chat template writes nothing after an answer: the model does not learn when to stop")
    return notices
