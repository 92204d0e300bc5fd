"""Text sources: reads the documents of a source from its files."""

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trimaran.core import DataSection, UserError, did_you_mean, read_regular_text, templated
from trimaran.core.plugins import SOURCES, find_plugin, load_plugin, plugin_errors
from trimaran.data import lazy_import
from trimaran.data.row_fields import answer_fields, field_of, learns_rejected, preference_error
from trimaran.data.text.bad_lines import BadLines
from trimaran.data.text.source_files import TextFile, files_with_progress, named_path, open_text_file, reading

HEAD_BYTES = 1 << 16
HEAD_FILES = 64
CHUNK_BYTES = 1 << 24


class DataSource(Protocol):
    """The contract of a data source, version 1. It reads what `data.path` names, however it likes."""

    contract: int

    def documents(self, data: DataSection) -> Iterator[str]:
        """Yield the texts, in the same order every time."""
        ...

    def fingerprint(self, data: DataSection) -> str:
        """Return a text that changes if the documents do. Packed tokens are kept in a cache under it."""
        ...


def plugin_documents(data: DataSection) -> Iterator[str]:
    """Yield the non-empty documents of a plug-in's source; raise UserError if it fails, or yields something else."""
    source: DataSource = load_plugin("data source", data.source)
    documents: Any = iter(())
    number = 0
    while True:
        with plugin_errors(partial(source_failed, data, templated("document {number}", number=number + 1))):
            documents = documents if number else iter(source.documents(data))
            text = next(documents, None)
        number += 1
        if text is None:
            return
        if not isinstance(text, str):
            raise UserError(
                "T076.document-source",
                where=f"data.source: {data.source}",
                number=number,
                source=data.source,
                kind=type(text).__name__,
            )
        if text:
            yield text


def plugin_fingerprint(data: DataSection) -> list[str]:
    """Return what the documents depend on: the plug-in's fingerprint, its distribution and version."""
    plugin = find_plugin("data source", data.source)
    with plugin_errors(partial(source_failed, data, "its fingerprint")):
        own = str(load_plugin("data source", data.source).fingerprint(data))
    return [own, plugin.distribution, plugin.version]


def source_failed(data: DataSection, what: str, kind: str, message: str) -> UserError:
    """Return the error about a source that raised one of this kind, with this message."""
    where = f"data.path: {data.path}" if data.path else f"data.source: {data.source}"
    return UserError("T075.source-failed", where=where, source=data.source, text=what, kind=kind, message=message)


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A chunk of a document, so that no file has to fit in memory. `fraction_read` is the progress in the source."""

    text: str
    ends_document: bool
    fraction_read: float


def read_chunks(section: DataSection, files: list[Path], bad: BadLines) -> Iterator[TextChunk]:
    """Yield the text of the files, document by document. Skips empty documents, and counts bad lines in `bad`."""
    return READERS.get(section.source, _read_plugin)(section, files, bad)


def check_file_starts(section: DataSection, files: list[Path]) -> None:
    """Raise if most lines at the start of the first files are bad; too many, if there is nothing else to read."""
    if section.source not in SOURCES:
        next(plugin_documents(section), "")
        return
    if section.source == "datasets":
        lazy_import.require("datasets", where="data.source")
        return
    bad, complete = BadLines(section.samples.max_bad), len(files) <= HEAD_FILES
    for file in files[:HEAD_FILES]:
        with reading(file), open_text_file(file) as opened:
            head = opened.stream.read(HEAD_BYTES)
        lines = head.removesuffix(b"\n").split(b"\n")
        if len(head) == HEAD_BYTES:
            whole_characters = codecs.utf_8_decode(head, "replace", False)[1]
            complete, lines = False, lines[:-1] or ([] if section.source == "jsonl" else [head[:whole_characters]])
        for number, line in enumerate(lines, start=1):
            where = f"{file}:{number}"
            if section.source == "jsonl":
                _line_text(line, section.text_field, where, bad)
                continue
            try:
                _decode_line(line, where)
                bad.add_good()
            except UserError as error:
                bad.add(error)
    bad.refuse_too_many(max_bad=None if complete else 0.5)


def _read_texts(section: DataSection, files: list[Path], bad: BadLines) -> Iterator[TextChunk]:
    for file, fraction_at in files_with_progress(files):
        with reading(file), open_text_file(file) as opened:
            for text, ends_document in _document_chunks(opened, file, section.samples.max_bad, bad):
                yield TextChunk(text, ends_document, fraction_at(opened.position()))


def _document_chunks(opened: TextFile, file: Path, max_bad: float, bad: BadLines) -> Iterator[tuple[str, bool]]:
    """Yield the text of a file in chunks of complete lines, and whether it is the last chunk.

    Lines that are not text are left out. If they are more than `max_bad` of the first chunk, the file is probably no
    text at all and is left out completely.
    """
    chunk, line_number, has_text = _next_chunk(opened), 1, False
    while chunk:
        following = _next_chunk(opened)
        text, errors = _decode_lines(chunk, file, line_number)
        num_lines = chunk.count(b"\n") + (not chunk.endswith(b"\n"))
        if line_number == 1 and len(errors) > max_bad * num_lines:
            while following:
                num_lines += following.count(b"\n") + (not following.endswith(b"\n"))
                following = _next_chunk(opened)
            bad.add(errors[0], lines=num_lines)
            return
        bad.add_good(num_lines - len(errors))
        for error in errors:
            bad.add(error)
        has_text = has_text or bool(text)
        if has_text:
            yield text, not following
        chunk, line_number = following, line_number + num_lines


def _next_chunk(opened: TextFile) -> bytes:
    chunk = opened.stream.read(CHUNK_BYTES)
    return chunk + next(opened.lines(), b"") if chunk else b""


def _decode_lines(chunk: bytes, file: Path, first_line: int) -> tuple[str, list[UserError]]:
    """Return the text of the lines in a chunk, and the errors of those that are not text."""
    if b"\0" not in chunk:
        try:
            return chunk.decode(), []
        except UnicodeDecodeError:
            pass
    texts, errors = [], []
    for number, line in enumerate(chunk.split(b"\n"), start=first_line):
        try:
            texts.append(_decode_line(line, f"{file}:{number}"))
        except UserError as error:
            errors.append(error)
    return "\n".join(texts), errors


def _read_jsonl(section: DataSection, files: list[Path], bad: BadLines) -> Iterator[TextChunk]:
    for file, fraction_at in files_with_progress(files):
        with reading(file), open_text_file(file) as opened:
            for number, line in enumerate(opened.lines(), start=1):
                if text := _line_text(line, section.text_field, f"{file}:{number}", bad):
                    yield TextChunk(text, ends_document=True, fraction_read=fraction_at(opened.position()))


def _read_datasets(section: DataSection, files: list[Path], bad: BadLines) -> Iterator[TextChunk]:
    module = lazy_import.load("text.hf_datasets", "datasets", where="data.source")
    for text, fraction_read in module.read_rows(named_path(section), files, section.text_field, bad):
        if text:
            yield TextChunk(text, ends_document=True, fraction_read=fraction_read)


def _read_plugin(section: DataSection, files: list[Path], bad: BadLines) -> Iterator[TextChunk]:
    for text in plugin_documents(section):
        bad.add_good()
        yield TextChunk(text, ends_document=True, fraction_read=0.0)


READERS: dict[str, Callable[[DataSection, list[Path], BadLines], Iterator[TextChunk]]] = {
    "python-stdlib": _read_texts,
    "text": _read_texts,
    "jsonl": _read_jsonl,
    "datasets": _read_datasets,
}


def _decode_line(line: bytes, where: str) -> str:
    """Return a line as text. Raises UserError with the place of the first byte that is not text."""
    if (zero := line.find(b"\0")) >= 0:
        what = f"a zero byte at column {zero + 1:,}"
    else:
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            what = f"byte 0x{line[error.start]:02x} at column {error.start + 1:,}, which is not UTF-8"
    raise UserError("T006.line-not-utf", where=where, text=what)


def _line_text(line: bytes, field: str, where: str, bad: BadLines) -> str:
    """Return the text of one JSONL line; empty for a blank line, and for a bad one, which is counted in `bad`."""
    if not line.strip():
        return ""
    try:
        row = json.loads(_decode_line(line, where))
    except UserError as error:
        bad.add(error)
    except (ValueError, RecursionError) as error:
        bad.add(UserError("T007.line-not-json", where=where, error=error))
    else:
        if isinstance(row, dict):
            return counted_text(row, field, where, bad)
        bad.add(UserError("T007.line-json", where=where, kind=type(row).__name__, field=field))
    return ""


def counted_text(row: dict, field: str, where: str, bad: BadLines) -> str:
    """Return the text in `field` of one row; empty for a bad row, which is counted in `bad`."""
    try:
        text = row_text(row, field, where)
    except UserError as error:
        has_field = field in row or field_of(row, field) is not None
        bad.add(error) if has_field else bad.add_without_field(error, row)
        return ""
    bad.add_good()
    return text


def row_text(row: dict, field: str, where: str) -> str:
    """Return the text in `field` of one row."""
    if learns_rejected(row, field):
        raise preference_error(where)
    text = field_of(row, field)
    if (text is None or isinstance(text, list)) and (answers := answer_fields(row)):
        names = " and ".join(f"'{name}'" for name in answers)
        raise UserError(
            "T078.field-holds", where=where, field=field, names=names, plural="are" if answers[1:] else "is"
        )
    if text is None and field not in row:
        raise UserError(
            "T008.no-field",
            where=where,
            field=field,
            guess=did_you_mean(field, row),
            row=", ".join(row) or "the existing fields",
        )
    if not isinstance(text, str):
        raise UserError("T008.field-holds", where=where, field=field, kind=type(text).__name__)
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError("T008.field-holds-unpaired", where=where, field=field)
    return text


def ignored_splits(path: Path) -> list[str]:
    """Return the splits of a saved DatasetDict that are not read: all but `train`, or but the only one."""
    try:
        splits = json.loads(read_regular_text(path / "dataset_dict.json", follow_links=True))["splits"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [str(name) for name in splits if name != "train"] if "train" in splits else []
