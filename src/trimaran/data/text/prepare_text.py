"""Finds the packed shards of a text source in a cache, and has them packed once."""

import hashlib
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trimaran.core import SOURCES, DataSection, UserError, needed_user_cache
from trimaran.data.text.array_folder import BAD
from trimaran.data.text.bad_lines import ceil_share
from trimaran.data.text.source_files import any_byte_order_mark, find_files, named_path
from trimaran.data.text.token_shards import FORMAT, TokenShards, count_sequences
from trimaran.data.text.tokenizer import Tokenizer, is_same_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from trimaran.data.text.pack_text import Progress


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return TRIMARAN_CACHE of `environ`, which only entry points read, or else a folder in the user's cache."""
    if named := environ.get("TRIMARAN_CACHE"):
        return Path(named)
    return needed_user_cache(environ) / "data"


def prepare(section: DataSection, *, cache: Path, progress: "Progress | None" = None) -> Path:
    """Return the folder of packed shards for `section`: its own path, or `cache/<fingerprint>`, packed if missing.

    Several processes may prepare the same data at once: the first to finish wins, the others drop their copy.
    """
    if section.source == "shards":
        path = named_path(section)
    else:
        files, tokenizer = find_files(section), load_tokenizer(section.tokenizer)
        path = cache / _fingerprint(section, files, tokenizer)
        if not path.exists():
            from trimaran.data.text.pack_text import pack_files  # noqa: PLC0415  most runs find their data packed

            with suppress(FileExistsError):  # another process finished first, with the same shards
                pack_files(section, files, tokenizer, path, progress)
    _check_shards(section, path)
    return path


def check(section: DataSection) -> None:
    """Raise if the data is missing, empty or unreadable. Reads only the start of files and packs nothing."""
    if section.source == "shards":
        _check_shards(section, named_path(section))
        return
    from trimaran.data.text.text_sources import check_file_starts  # noqa: PLC0415  as in `prepare`
    from trimaran.data.text.token_files import TOKEN_SOURCES, check_token_files  # noqa: PLC0415

    files, tokenizer = find_files(section), load_tokenizer(section.tokenizer)
    if section.source in TOKEN_SOURCES:
        check_token_files(section, files, tokenizer)
    else:
        check_file_starts(section, files)


def _check_shards(section: DataSection, path: Path) -> None:
    shards = TokenShards.open(path)
    num_bad, num_lines, max_bad = shards.meta.num_bad, shards.meta.num_lines, section.samples.max_bad
    if num_bad > max_bad * num_lines:
        raise UserError(
            "T031.lines-left-out",
            where=str(path / BAD),
            num_bad=num_bad,
            num_lines=num_lines,
            max_bad=max_bad,
            ceil_share=ceil_share(num_bad, num_lines),
        )
    count_sequences(shards, section.seq_len)
    if section.source == "shards" and section.tokenizer is not None:
        requested = load_tokenizer(section.tokenizer)
        if not is_same_tokenizer(requested, shards.tokenizer):
            raise UserError(
                "T019.shards-packed-with",
                where="data.tokenizer",
                vocab_size=shards.vocab_size,
                requested_vocab_size=requested.vocab_size,
            )


def _fingerprint(section: DataSection, files: list[Path], tokenizer: Tokenizer) -> str:
    """Return a hash of everything that the packed tokens depend on."""
    folders = {folder: folder.resolve() for folder in {file.parent for file in files}}
    paths = [file.resolve() if file.is_symlink() else folders[file.parent] / file.name for file in files]
    stats = [(str(path), path.stat()) for path in paths]
    parts = {
        "format": FORMAT,
        "source": section.source,
        "text_field": section.text_field,
        "tokenizer": tokenizer.describe().get("sha256", "bytes"),
        "python": sys.version if section.source == "python-stdlib" else None,
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
    }
    if section.source not in SOURCES:
        from trimaran.data.text.text_sources import plugin_fingerprint  # noqa: PLC0415  few runs read with a plug-in

        parts["plugin"] = ", ".join(plugin_fingerprint(section))
    if "rejected" in section.text_field:
        parts["rejected"] = "refused"  # earlier versions packed the rejected answers of preference data
    if section.source != "python-stdlib" and any_byte_order_mark(files):  # it has none, and hundreds of files
        parts["byte_order_mark"] = "skipped"  # earlier versions packed it; files without one keep their fingerprint
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
