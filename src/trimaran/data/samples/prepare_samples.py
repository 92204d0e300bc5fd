"""From one source or several to an index of samples, once."""

import hashlib
import json
import math
import os
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from trimaran.core import DataSection, ImageRules, MixtureSource, UserError
from trimaran.data import drawn_shapes
from trimaran.data.prepare_text import Progress
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.image_header import Ruler
from trimaran.data.samples.raw_sample import RawSample, Task
from trimaran.data.samples.readers import READERS, read_samples
from trimaran.data.samples.sample_index import MIXTURE, Ingredient, SampleIndex, SourceMixture
from trimaran.data.samples.source_part import FORMAT, PartWriter, SamplePart
from trimaran.data.samples.tokenize_chat import SIGHTLESS, ChatTokenizer
from trimaran.data.text_sources import find_files
from trimaran.data.token_shards import rename_into_place
from trimaran.data.tokenizer import load_tokenizer

BATCH_SAMPLES = 1024
BATCH_IMAGE_BYTES = 256 << 20
SHOWN = 5
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def prepare_samples(
    section: DataSection, *, rules: ImageRules | None, cache: Path, progress: Progress | None = None
) -> Path:
    """Return the folder of the samples of `section`, which `SampleIndex.open` opens; made under `cache` when missing.

    Each source has a folder of its own, so a mixture with other weights or one more source reads nothing again. Any
    number of processes may prepare the same data at once: the first to finish wins, the others drop their copy.
    """
    speller = ChatTokenizer(load_tokenizer(section.tokenizer), section.samples.template, rules, section.seq_len)
    ingredients = []
    for source in sources_of(section):
        task = _task(section, source, rules)
        part = _fingerprint(task, speller, section.seq_len)
        if not (cache / part).exists():
            with suppress(FileExistsError):  # another process was first, with the same samples
                _prepare_part(task, speller, cache / part, section.samples.max_bad, progress)
        opened = SamplePart.open(cache / part)
        _refuse_many_bad(task, opened.num_samples, opened.meta.num_bad, opened.bad, section.samples.max_bad)
        ingredients.append(Ingredient(name=source.name, part=part, weight=source.weight, epochs=source.epochs))
    mixture = SourceMixture(sources=tuple(ingredients))
    path = cache / hashlib.sha256(mixture.model_dump_json().encode()).hexdigest()[:32]
    if not path.exists():
        with suppress(FileExistsError):
            _write_mixture(path, mixture)
    SampleIndex.open(path).mixed(seed=0)  # weights that cannot be are better known before a run is started
    return path


def check_samples(section: DataSection, rules: ImageRules | None) -> None:
    """Raise what a quick look can find: missing or empty data, a tokenizer that does not fit. Prepares nothing."""
    ChatTokenizer(load_tokenizer(section.tokenizer), section.samples.template, rules, section.seq_len)
    for source in sources_of(section):
        _task(section, source, rules)


def sources_of(section: DataSection) -> tuple[MixtureSource, ...]:
    """Return the sources to mix: those of the mixture, or the one that the section itself names."""
    sources = section.mixture or (
        MixtureSource(name=section.source, source=section.source, path=section.path, text_field=section.text_field),
    )
    if twice := [name for name, count in Counter(source.name for source in sources).items() if count > 1]:
        raise UserError("T039", f"two sources have the name '{twice[0]}'", where="data.mixture",
                        fix="give each source a name of its own: its loss is reported under it")  # fmt: skip
    for source in sources:
        if source.source not in READERS:
            raise UserError("T030", f"{source.source} cannot be read as samples", where=_where(section, source),
                            fix=f"use one of {', '.join(READERS)}")  # fmt: skip
    return sources


def _task(section: DataSection, source: MixtureSource, rules: ImageRules | None) -> Task:
    """Return the source with its files; raise what a look at their names finds."""
    if source.source == "shapes" and rules is None:
        raise _sightless("the samples of shapes are about images", _where(section, source))
    if source.path is not None and source.source == "webdataset" and _compressed(Path(source.path)):
        raise UserError("T035", "a compressed tar file cannot be read at an offset", where=_where(section, source),
                        fix="unpack it: gunzip and the like leave a .tar, which loads faster too")  # fmt: skip
    own = DataSection(source=source.source, path=source.path, text_field=source.text_field)
    try:
        files = [] if source.source == "shapes" and source.path is None else find_files(own)
    except UserError as error:
        if not section.mixture:
            raise
        where = f"{_where(section, source)}, {error.where}"
        raise UserError(error.code, error.what, where=where, fix=error.fix) from None
    return Task(source, files, source.images or section.samples.images)


def _compressed(path: Path) -> bool:
    """Return whether the path is a compressed tar file, or a folder that has those and no others."""
    names = os.listdir(path) if path.is_dir() else [path.name]
    return any(name.endswith(COMPRESSED) for name in names) and not any(name.endswith(".tar") for name in names)


def _where(section: DataSection, source: MixtureSource) -> str:
    return f"data.mixture: {source.name}" if section.mixture else f"data.source: {source.source}"


def _prepare_part(task: Task, speller: ChatTokenizer, path: Path, max_bad: float, progress: Progress | None) -> None:
    """Write the samples of one source, unless too many of them are bad."""
    first_bad: list[dict[str, str]] = []
    try:
        with closing(Ruler()) as ruler, PartWriter(path, speller.tokenizer, speller.vocab_size) as writer:
            for batch in _batches(read_samples(task)):
                for found, outcome in zip(batch, _spell(batch, speller, ruler), strict=True):
                    if not isinstance(outcome, BadSampleError):
                        writer.add(found, outcome)
                        continue
                    writer.leave_out(found, str(outcome))
                    if len(first_bad) < SHOWN:
                        first_bad.append({"where": found.origin, "reason": str(outcome)})
                if progress is not None:
                    progress(f"preparing {task.source.name}", batch[-1].done)
            _refuse_many_bad(task, writer.num_samples, writer.num_bad, first_bad, max_bad)
    except FileExistsError:
        raise
    except OSError as error:
        if error.filename and not Path(error.filename).is_relative_to(path.parent.absolute()):
            raise UserError("T004", f"this cannot be read: {error.strerror}", where=str(error.filename),
                            fix="check the name, the permissions and the disk") from None  # fmt: skip
        raise UserError("T037", f"the prepared samples cannot be written: {error.strerror}", where=str(path),
                        fix="choose a folder on a disk with free space that you may write to") from None  # fmt: skip


def _spell(batch: list[RawSample], speller: ChatTokenizer, ruler: Ruler) -> Iterator:
    """Yield for each sample what is to be written, or why it is bad."""
    sizes = ruler.measure([found.images for found in batch])
    good = [
        found for found, size in zip(batch, sizes, strict=True) if not (found.bad or isinstance(size, BadSampleError))
    ]
    spelled = iter(speller.spell(good))
    for found, size in zip(batch, sizes, strict=True):
        if found.bad is not None:
            yield BadSampleError(found.bad)
        elif isinstance(size, BadSampleError):
            yield size
        else:
            pieces = next(spelled)
            yield [replace(pieces[0], images=size)] if size and isinstance(pieces, list) else pieces


def _batches(samples: Iterable[RawSample]) -> Iterator[list[RawSample]]:
    """Yield the samples in lists that are large enough for a tokenizer's threads and small enough for memory."""
    batch: list[RawSample] = []
    num_bytes = 0
    for found in samples:
        batch.append(found)
        num_bytes += sum(len(image) for image in found.images if isinstance(image, bytes))
        if len(batch) >= BATCH_SAMPLES or num_bytes > BATCH_IMAGE_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _refuse_many_bad(task: Task, num_good: int, num_bad: int, bad: list[dict[str, str]], max_bad: float) -> None:
    """Raise when a larger share of the source is bad than the recipe allows, or nothing is good."""
    shown = "".join(f"\n         {entry['where']}: {entry['reason']}" for entry in islice(bad, SHOWN))
    more = f"\n         and {num_bad - SHOWN:,} more" if num_bad > SHOWN else ""
    name, total = task.source.name, num_good + num_bad
    if num_bad > max_bad * total and all(entry["reason"] == SIGHTLESS for entry in islice(bad, SHOWN)):
        raise _sightless(f"{num_bad:,} of {total:,} samples of {name} have images", "model.family")
    if not num_good:
        raise UserError("T032", f"no sample of {name} can be used{':' if num_bad else ''}{shown}{more}",
                        where=f"data.source: {task.source.source}",
                        fix="name data with at least one sample of the kind that the source says")  # fmt: skip
    if num_bad > max_bad * total:
        raise UserError("T031", f"{num_bad:,} of {total:,} samples of {name} are bad, and the share that may be is "
                        f"{max_bad:g}:{shown}{more}", where="data.samples.max_bad",
                        fix="mend them (image paths start at data.samples.images, or at the file that names them), or "
                        f"set data.samples.max_bad to {math.ceil(1000 * num_bad / total) / 1000:g}")  # fmt: skip


def _sightless(what: str, where: str) -> UserError:
    fix = "use a model of family vlm, or data without images"
    return UserError("T051", f"{what}, and this model does not see", where=where, fix=fix)


def _fingerprint(task: Task, speller: ChatTokenizer, seq_len: int) -> str:
    """Return a name that changes when anything does that the tokens of a source depend on, but for its images."""
    source = task.source
    stats = [(str(file.resolve()), file.stat()) for file in task.files]
    parts = {
        "format": FORMAT,
        "source": source.source,
        "text_field": source.text_field,
        "tokenizer": speller.tokenizer.describe().get("sha256", "bytes"),
        "template": speller.template,
        "picture": speller.image_ids.tolist(),
        "seq_len": seq_len,  # documents are cut into pieces of it
        "images": task.images and os.path.abspath(task.images),
        "made": {"python-stdlib": sys.version, "shapes": drawn_shapes.VERSION}.get(source.source),
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _write_mixture(path: Path, mixture: SourceMixture) -> None:
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    draft.mkdir(parents=True)
    try:
        (draft / MIXTURE).write_text(mixture.model_dump_json(indent=2) + "\n", encoding="utf-8")
        rename_into_place(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
