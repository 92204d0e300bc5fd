"""Tokens: sources, packed shards and the order of samples. Only `trimaran.data.loader` needs torch."""

from trimaran.data.order import position, positions
from trimaran.data.prepare import Progress, cache_folder, check, pack, prepare
from trimaran.data.sequences import IGNORED, Sample, Sequences, split
from trimaran.data.shards import ShardWriter, TokenShards
from trimaran.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "IGNORED",
    "ByteTokenizer",
    "Progress",
    "Sample",
    "Sequences",
    "ShardWriter",
    "TokenShards",
    "Tokenizer",
    "cache_folder",
    "check",
    "load_tokenizer",
    "pack",
    "position",
    "positions",
    "prepare",
    "split",
]
