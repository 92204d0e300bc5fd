"""Text and tokens: sources, tokenizers, packing, and token shards."""
