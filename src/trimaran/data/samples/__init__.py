"""Samples with and without images: reads common file formats and writes an index of tokens."""
