"""Data sources of plug-ins: they yield documents as texts, which are tokenized and packed as those of any source."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

from trimaran.core import DataSection, UserError
from trimaran.core.plugins import find_plugin, load_plugin, plugin_errors


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
        with plugin_errors(partial(source_failed, data, f"document {number + 1}")):
            documents = documents if number else iter(source.documents(data))
            text = next(documents, None)
        number += 1
        if text is None:
            return
        if not isinstance(text, str):
            raise UserError("T076", f"document {number} of the source {data.source} is a {type(text).__name__}, not a "
                            "text", where=f"data.source: {data.source}", fix="let documents() yield str")  # fmt: skip
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
    return UserError("T075", f"the source {data.source} failed at {what}: {kind}: {message}", where=where,
                     fix="check data.path, and what the plug-in says about it")  # fmt: skip
