"""What a person should know about packed text: lines that were left out, ignored splits."""

from pathlib import Path

from trimaran.core import DataSection, MixtureSource
from trimaran.data.text.bad_lines import as_notice
from trimaran.data.text.source_files import held_out_files
from trimaran.data.text.text_sources import ignored_splits
from trimaran.data.text.token_shards import BAD, TokenShards


def text_notices(section: DataSection, shards: TokenShards) -> list[str]:
    """Return the notices about packed text."""
    meta, notices = shards.meta, split_notices(section)
    if meta.num_bad:
        notices.append(as_notice(meta.num_bad, meta.num_lines, shards.bad, str(shards.path / BAD)))
    return notices


def split_notices(source: DataSection | MixtureSource) -> list[str]:
    """Return notices about the splits of a source that are not used."""
    if source.source == "nanogpt" and source.path and Path(source.path).is_dir():
        held_out = held_out_files(sorted(Path(source.path).rglob("*.bin")))
        return [f"{source.path}: {file.name} is not used for training" for file in held_out]
    ignored = ignored_splits(Path(source.path)) if source.source in ("datasets", "chat") and source.path else []
    if not ignored:
        return []
    names = f"split {ignored[0]} is" if len(ignored) == 1 else f"splits {', '.join(ignored)} are"
    return [f"{source.path}: only the split train is read; the {names} not used"]
