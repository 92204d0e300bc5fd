"""What a row of the data holds, estimated from its first samples: nothing is prepared, and no image is decoded."""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from trimaran.core import DataSection, ImageRules, RowSizes
from trimaran.data.quarantine import BadSampleError
from trimaran.data.row_packing import slots_per_row
from trimaran.data.samples.prepare_samples import find_source_files, size_threads, sources_of, tokenize_batch
from trimaran.data.samples.readers import read_samples
from trimaran.data.samples.source_part import TokenizedSample
from trimaran.data.samples.tokenize_chat import ChatTokenizer
from trimaran.data.text.tokenizer import load_tokenizer
from trimaran.data.vision.image_grid import measure_images

NUM_SAMPLES = 256  # of each source
PACKED_FRACTION = 0.98  # of a row's tokens that best-fit packing fills


def estimate_rows(section: DataSection, rules: ImageRules | None) -> RowSizes | None:
    """Return what a row of `section` holds on average; None if no sample can be read.

    Only the first samples of each source are read, and of each image only its first bytes. Data in which later samples
    have other sizes is therefore estimated wrongly. Raises UserError if the data is missing.
    """
    tokenizer = ChatTokenizer(load_tokenizer(section.tokenizer), section.samples.template, rules, section.seq_len)
    tables = []
    for source in sources_of(section):
        raw = list(islice(read_samples(find_source_files(section, source, rules)), NUM_SAMPLES))
        with size_threads() as threads:
            outcomes = list(tokenize_batch(raw, tokenizer, threads))
        samples = [each for outcome in outcomes if not isinstance(outcome, BadSampleError) for each in outcome]
        fraction = raw[-1].fraction_read if len(raw) == NUM_SAMPLES else 1.0
        total = len(samples) / fraction if fraction > 0 else float(len(samples))
        sizes = np.array([each for sample in samples for each in _sizes(sample, rules, section.seq_len)])
        share = source.weight or total * (source.epochs or 1.0)
        if len(sizes):
            tables.append((sizes, np.full(len(sizes), share / len(sizes))))
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


def _sizes(sample: TokenizedSample, rules: ImageRules | None, seq_len: int) -> Iterator[tuple[float, ...]]:
    """Yield tokens, images, patches and pairs of patches of a sample, if it fits a row."""
    length, images = len(sample.tokens), np.array([each[1:] for each in sample.images])
    patches = pairs = 0
    if rules is not None and len(images):
        measured = measure_images(images, rules)
        length += int((measured.tokens - 1).sum())
        patches, pairs = int(measured.patches.sum()), int(measured.patch_pairs.sum())
    if length <= seq_len or not patches:  # a sample whose images would be cut is left out
        yield min(length, seq_len), len(images), patches, pairs
