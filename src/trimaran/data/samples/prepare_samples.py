"""Tokenizes one or several sample sources into an index, once, in a cache; or the first samples, for an estimate."""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from trimaran.core import DataSection, ImageRules, MixtureSource, RowSizes, UserError, open_regular_file
from trimaran.data import drawn_shapes
from trimaran.data.quarantine import BadSampleError
from trimaran.data.row_fields import PREFERENCE_REASON, preference_error
from trimaran.data.row_packing import slots_per_row
from trimaran.data.samples.raw_sample import (
    DEFAULT_CHOICE,
    FrameChoice,
    ImageLocation,
    ImageSource,
    RawSample,
    SizedImage,
    SourceFiles,
)
from trimaran.data.samples.readers import READERS, read_samples
from trimaran.data.samples.sample_index import MIXTURE, MixtureEntry, SampleIndex, SourceMixture
from trimaran.data.samples.source_part import FORMAT, PartWriter, SamplePart
from trimaran.data.samples.tokenize_chat import NO_IMAGES_REASON, ChatTokenizer
from trimaran.data.text.array_folder import drafted
from trimaran.data.text.bad_lines import ceil_share
from trimaran.data.text.pack_text import Progress, in_batches
from trimaran.data.text.source_files import any_byte_order_mark, find_files
from trimaran.data.text.tokenizer import load_tokenizer
from trimaran.data.vision.decode import BadImageError, upright_size
from trimaran.data.vision.image_grid import measure_images

BATCH_SAMPLES = 1024
BATCH_IMAGE_BYTES = 256 << 20
FRAMES_TOGETHER = 2  # with temporal patches
MAX_SHOWN_BAD = 5
READING_RULES = 2  # the version of how rows are read; raise it so that prepared samples are prepared again
COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
HEAD_BYTES = 1 << 16
MAX_ASPECT_RATIO = 200
NUM_THREADS = 8
NUM_ESTIMATED_SAMPLES = 256  # of each source
PACKED_FRACTION = 0.98  # of a row's tokens that best-fit packing fills


def size_threads() -> ThreadPoolExecutor:
    """Return threads that read image sizes: a network file system has high latency but serves many at once."""
    Image.init()  # Pillow registers its formats on first use, which is not thread-safe
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="image-size")


def prepare_samples(
    section: DataSection, *, rules: ImageRules | None, cache: Path, progress: Progress | None = None
) -> Path:
    """Return the index folder of the samples of `section`, for `SampleIndex.open`; written to `cache` if missing.

    Each source has its own folder, so a change of weights or an added source does not read the others again. Several
    processes may prepare the same data at once: the first to finish wins, the others drop their copy.
    """
    chat_tokenizer = ChatTokenizer(load_tokenizer(section.tokenizer), section.samples.template, rules, section.seq_len)
    entries = []
    for source in sources_of(section):
        files = find_source_files(section, source, rules)
        part = _fingerprint(files, chat_tokenizer, section.seq_len)
        if not (cache / part).exists():
            with suppress(FileExistsError):  # another process finished first, with the same samples
                _prepare_part(files, chat_tokenizer, cache / part, section.samples.max_bad, progress)
        opened = SamplePart.open(cache / part)
        _refuse_many_bad(files, opened.num_samples, opened.meta.num_bad, opened.bad, section.samples.max_bad)
        entries.append(MixtureEntry(name=source.name, part=part, weight=source.weight, epochs=source.epochs))
    mixture = SourceMixture(sources=tuple(entries))
    path = cache / hashlib.sha256(mixture.model_dump_json().encode()).hexdigest()[:32]
    if not path.exists():
        with suppress(FileExistsError), drafted(path) as draft:
            (draft / MIXTURE).write_text(mixture.model_dump_json(indent=2) + "\n", encoding="utf-8")
    SampleIndex.open(path).mixed(seed=0)  # raises on impossible weights before a run starts
    return path


def check_samples(section: DataSection, rules: ImageRules | None) -> None:
    """Raise if data is missing or empty, or the tokenizer does not fit. Prepares nothing."""
    ChatTokenizer(load_tokenizer(section.tokenizer), section.samples.template, rules, section.seq_len)
    for source in sources_of(section):
        find_source_files(section, source, rules)


def sources_of(section: DataSection) -> tuple[MixtureSource, ...]:
    """Return the sources: those of the mixture, or the section's own."""
    sources = section.mixture or (
        MixtureSource(name=section.source, source=section.source, path=section.path, text_field=section.text_field),
    )
    if duplicates := [name for name, count in Counter(source.name for source in sources).items() if count > 1]:
        raise UserError("T039.two-sources-name", where="data.mixture", duplicates=duplicates[0])
    for source in sources:
        if source.source not in READERS:
            raise UserError(
                "T030.cannot-read-samples",
                where=_where(section, source),
                source=source.source,
                readers=", ".join(READERS),
            )
    return sources


def find_source_files(section: DataSection, source: MixtureSource, rules: ImageRules | None) -> SourceFiles:
    """Return the source with its files. Raises if they are missing or of an unsupported type."""
    if source.source == "shapes" and rules is None:
        raise _takes_no_images("the samples of shapes have images", _where(section, source))
    if source.path is not None and source.source == "webdataset":
        names = os.listdir(source.path) if os.path.isdir(source.path) else [Path(source.path).name]
        is_compressed = any(name.endswith(COMPRESSED_SUFFIXES) for name in names)
        if is_compressed and not any(name.endswith(".tar") for name in names):
            raise UserError("T035.compressed-tar-file", where=_where(section, source))
    own = DataSection(source=source.source, path=source.path, text_field=source.text_field)
    try:
        files = [] if source.source == "shapes" and source.path is None else find_files(own)
    except UserError as error:
        if not section.mixture:
            raise
        where = f"{_where(section, source)}, {error.where}"
        raise UserError(error.code, error.what, where=where, fix=error.fix) from None
    samples = section.samples
    frames = FrameChoice(samples.frames_per_second, samples.max_frames)
    if samples.temporal_patches:
        frames = replace(frames, together=FRAMES_TOGETHER, time_positions=rules.time_positions if rules else None)
    return SourceFiles(source, files, source.images or samples.images, frames)


def _where(section: DataSection, source: MixtureSource) -> str:
    return f"data.mixture: {source.name}" if section.mixture else f"data.source: {source.source}"


def _prepare_part(
    files: SourceFiles, chat_tokenizer: ChatTokenizer, path: Path, max_bad: float, progress: Progress | None
) -> None:
    """Write the samples of one source. Raises if too many of them are bad."""
    first_bad: list[dict[str, str]] = []
    writer = PartWriter(path, chat_tokenizer.tokenizer, chat_tokenizer.vocab_size)
    try:
        with size_threads() as threads, writer:
            for batch in in_batches(read_samples(files), _fraction_of_batch, 1.0):
                for raw, outcome in zip(batch, tokenize_batch(batch, chat_tokenizer, threads), strict=True):
                    if not isinstance(outcome, BadSampleError):
                        writer.add(raw, outcome)
                        continue
                    writer.add_bad(raw, str(outcome))
                    if len(first_bad) < MAX_SHOWN_BAD:
                        first_bad.append({"where": raw.origin, "reason": str(outcome)})
                if progress is not None:
                    progress(f"preparing {files.source.name}", batch[-1].fraction_read)
            _refuse_many_bad(files, writer.num_samples, writer.num_bad, first_bad, max_bad)
    except FileExistsError:
        raise
    except OSError as error:
        if error.filename and not Path(error.filename).is_relative_to(path.parent.absolute()):
            raise UserError("T004.cannot-read", where=str(error.filename), reason=error.strerror) from None
        raise UserError("T037.prepared-samples", where=str(path), reason=error.strerror) from None


def _fraction_of_batch(raw: RawSample) -> float:
    """Return a sample's part of a batch: enough of them for a tokenizer's threads, and not too many for memory."""
    num_bytes = sum(len(image) for image in raw.single_images if isinstance(image, bytes))
    return 1 / BATCH_SAMPLES + num_bytes / BATCH_IMAGE_BYTES


def tokenize_batch(batch: list[RawSample], chat_tokenizer: ChatTokenizer, threads: ThreadPoolExecutor) -> Iterator:
    """Yield the tokenized samples of each raw sample, or why it is bad."""
    parts = [batch[start::NUM_THREADS] for start in range(NUM_THREADS)]
    results = list(threads.map(lambda part: [_sized_images(raw.single_images) for raw in part], parts))
    sizes = [results[number % NUM_THREADS][number // NUM_THREADS] for number in range(len(batch))]
    good = [raw for raw, size in zip(batch, sizes, strict=True) if not (raw.bad or isinstance(size, BadSampleError))]
    tokenized = iter(chat_tokenizer.tokenize(good))
    for raw, size in zip(batch, sizes, strict=True):
        if raw.bad is not None:
            yield BadSampleError(raw.bad)
        elif isinstance(size, BadSampleError):
            yield size
        else:
            samples = next(tokenized)
            if size and isinstance(samples, list):
                samples = [chat_tokenizer.with_images(each, raw.images, size) for each in samples]
            yield samples


def _refuse_many_bad(
    files: SourceFiles, num_good: int, num_bad: int, bad: list[dict[str, str]], max_bad: float
) -> None:
    """Raise if the fraction of bad samples exceeds `max_bad`, or no sample is good."""
    bad = bad[:MAX_SHOWN_BAD]
    shown = "".join(f"\n         {entry['where']}: {entry['reason']}" for entry in bad)
    more = f"\n         and {num_bad - MAX_SHOWN_BAD:,} more" if num_bad > MAX_SHOWN_BAD else ""
    name, total = files.source.name, num_good + num_bad
    too_many = num_bad > max_bad * total
    reasons = {entry["reason"] for entry in bad}
    if too_many and reasons == {PREFERENCE_REASON}:
        raise preference_error(bad[0]["where"])
    if too_many and reasons == {NO_IMAGES_REASON}:
        raise _takes_no_images(f"{num_bad:,} of {total:,} samples of {name} have images", "model.family")
    if not num_good:
        raise UserError(
            "T032.no-sample",
            where=f"data.source: {files.source.source}",
            name=name,
            value=":" if num_bad else "",
            shown=shown,
            more=more,
        )
    if too_many:
        allowed = ceil_share(num_bad, total)
        raise UserError(
            "T031.samples-bad-allowed",
            where="data.samples.max_bad",
            num_bad=num_bad,
            total=total,
            name=name,
            max_bad=max_bad,
            shown=shown,
            more=more,
            allowed=allowed,
        )


def _takes_no_images(what: str, where: str) -> UserError:
    return UserError("T051.model-takes", where=where, text=what)


def _fingerprint(files: SourceFiles, chat_tokenizer: ChatTokenizer, seq_len: int) -> str:
    """Return a hash of everything that the tokens of a source depend on, except the content of its images."""
    source = files.source
    stats = [(str(file.resolve()), file.stat()) for file in files.files]
    parts = {
        "format": FORMAT,
        "source": source.source,
        "text_field": source.text_field,
        "tokenizer": chat_tokenizer.tokenizer.describe().get("sha256", "bytes"),
        "template": chat_tokenizer.template,
        "picture": chat_tokenizer.image_ids.tolist(),
        "seq_len": seq_len,  # long documents are split at this length
        "images": files.images and os.path.abspath(files.images),
        "made": {"python-stdlib": sys.version, "shapes": drawn_shapes.VERSION}.get(source.source),
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
    }
    if source.source not in ("text", "python-stdlib", "shapes"):
        parts["rules"] = READING_RULES
    frames, usual = files.frames, DEFAULT_CHOICE
    if frames.together > 1:  # data without videos has the fingerprint of earlier versions
        parts["frames_together"] = frames.together
    if frames.time_positions is not None:
        parts["time_positions"] = frames.time_positions
    if (frames.per_second, frames.most) != (usual.per_second, usual.most):
        parts["frames"] = (frames.per_second, frames.most)
    if source.source == "text" and any_byte_order_mark(files.files):
        parts["byte_order_mark"] = "skipped"  # earlier versions kept it; files without one keep their fingerprint
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _sized_images(images: Sequence[ImageSource]) -> tuple[SizedImage, ...] | BadSampleError:
    """Return the images of a sample with width and height, or the error of its first bad image."""
    try:
        return tuple(_sized(image) for image in images)
    except BadSampleError as error:
        return error


def _sized(image: ImageSource) -> SizedImage:
    """Return the image (with its length in bytes), and its upright width and height."""
    if isinstance(image, bytes):
        return (image, *_size(image, "an image inside the row"))
    try:
        with open_regular_file(image.file, follow_links=True) as stream:
            length = os.fstat(stream.fileno()).st_size if image.length < 0 else image.length
            head = os.pread(stream.fileno(), min(length, HEAD_BYTES), image.offset)
            try:
                size = _size(head, image.file)
            except BadSampleError:
                if length <= HEAD_BYTES:
                    raise
                size = _size(os.pread(stream.fileno(), length, image.offset), image.file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadSampleError(f"the image cannot be read: {reason}: {image.file}") from None
    return (ImageLocation(image.file, image.offset, length), *size)


def _size(head: bytes, name: str) -> tuple[int, int]:
    try:
        width, height = upright_size(head)
    except BadImageError as error:
        unknown = "cannot identify" in str(error)  # Pillow's message names an object in memory, not the file
        reason = "this is not an image, or its header is damaged" if unknown else str(error)
        raise BadSampleError(f"{reason}: {name}") from None
    if width < 1 or height < 1 or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        too_long = f"one side is more than {MAX_ASPECT_RATIO} times the other"
        reason = too_long if min(width, height) > 0 else "it is empty"
        raise BadSampleError(f"an image of {width} x {height} pixels, {reason}: {name}")
    return width, height


def estimate_rows(section: DataSection, rules: ImageRules | None) -> RowSizes | None:
    """Return what a row of `section` holds on average; None if no sample can be read.

    Only the first samples of each source are read, and of each image only its first bytes. Data in which later samples
    have other sizes is therefore estimated wrongly. Raises UserError if the data is missing.
    """
    tokenizer = ChatTokenizer(load_tokenizer(section.tokenizer), section.samples.template, rules, section.seq_len)
    tables = []
    for source in sources_of(section):
        raw = list(islice(read_samples(find_source_files(section, source, rules)), NUM_ESTIMATED_SAMPLES))
        with size_threads() as threads:
            outcomes = list(tokenize_batch(raw, tokenizer, threads))
        samples = [each for outcome in outcomes if not isinstance(outcome, BadSampleError) for each in outcome]
        fraction = raw[-1].fraction_read if len(raw) == NUM_ESTIMATED_SAMPLES else 1.0
        total = len(samples) / fraction if fraction > 0 else float(len(samples))
        sizes = []  # tokens, images, patches and pairs of patches
        for sample in samples:
            length, images = len(sample.tokens), np.array([each[1:] for each in sample.images])
            patches = pairs = 0
            if rules is not None and len(images):
                measured = measure_images(images, rules)
                length += int((measured.tokens - 1).sum())
                patches, pairs = int(measured.patches.sum()), int(measured.patch_pairs.sum())
            if length <= section.seq_len or not patches:  # a sample whose images would be cut is left out
                sizes.append((min(length, section.seq_len), len(images), patches, pairs))
        share = source.weight or total * (source.epochs or 1.0)
        if sizes:
            tables.append((np.array(sizes), np.full(len(sizes), share / len(sizes))))
    if not tables:
        return None
    sizes, weights = (np.concatenate(each) for each in zip(*tables, strict=True))
    lengths, images, patches, pairs = sizes.T
    rows = {
        "pack": lengths / (PACKED_FRACTION * section.seq_len),
        "bucket": 1.0 / slots_per_row(lengths.astype(np.int64), section.seq_len),
        "pad": np.ones(len(lengths)),
    }[section.samples.batching]
    num_rows, num_patches = float(weights @ rows), float(weights @ patches)
    return RowSizes(
        images=float(weights @ images) / num_rows,
        patches=num_patches / num_rows,
        image_patches=float(weights @ pairs) / max(1.0, num_patches),
        attended_tokens=float(weights @ lengths**2) / (num_rows * section.seq_len),
        num_samples=len(sizes),
    )
