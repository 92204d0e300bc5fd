"""What a person should know about prepared samples: those left out, ignored splits, the chat template."""

from trimaran.app.recipe.data_notices import split_notices
from trimaran.core import DataSection, ImageRules
from trimaran.data.samples.prepare_samples import sources_of
from trimaran.data.samples.sample_index import SampleIndex
from trimaran.data.samples.tokenize_chat import ChatTokenizer
from trimaran.data.text.token_shards import BAD

TEMPLATE_SOURCES = ("chat", "parquet", "datasets", "webdataset", "shapes")  # may hold conversations


def sample_notices(section: DataSection, index: SampleIndex, rules: ImageRules | None) -> list[str]:
    """Return the notices about prepared samples."""
    notices = [notice for source in sources_of(section) for notice in split_notices(source)]
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
