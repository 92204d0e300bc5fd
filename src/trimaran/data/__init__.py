"""Training data: text sources, packed token shards, samples with images, and the order of samples.

Only `loader` and `step_batch` import torch.
"""

from trimaran.data.prepare_text import Progress, cache_folder, check, pack, prepare
from trimaran.data.sample_order import position, positions
from trimaran.data.sequences import IGNORED, Sequences, TokenSample, split
from trimaran.data.token_shards import ShardWriter, TokenShards
from trimaran.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "IGNORED",
    "ByteTokenizer",
    "Progress",
    "Sequences",
    "ShardWriter",
    "TokenSample",
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
