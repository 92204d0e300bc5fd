"""Samples with and without pictures: from anybody's files to an index of tokens."""

from trimaran.data.samples.index import IndexedSample, SampleIndex
from trimaran.data.samples.prepare import check_samples, prepare_samples

__all__ = ["IndexedSample", "SampleIndex", "check_samples", "prepare_samples"]
