"""Samples with and without images: reads common file formats and writes an index of tokens."""

from trimaran.data.samples.prepare_samples import check_samples, prepare_samples
from trimaran.data.samples.sample_index import SampleIndex, SampleRecord

__all__ = ["SampleIndex", "SampleRecord", "check_samples", "prepare_samples"]
