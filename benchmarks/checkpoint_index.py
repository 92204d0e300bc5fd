"""Measures the index of a checkpoint of many ranks: its size, and the time to write it, to open it and to use it.

    python benchmarks/checkpoint_index.py --shards 512 --tp 8 [--layers 80] [--plain]

The layouts are synthetic: a decoder like a 70B Llama with AdamW, each tensor split over `tp` and then over `shards`
ranks along its first dimension, as FSDP2 does it (blocks of ceil(n / shards) rows, the last ones smaller or empty).
`--plain` measures the older form, which takes minutes and gigabytes for 4,096 ranks.
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from math import prod

from trimaran.checkpoint import shard_index
from trimaran.checkpoint.shard_index import ShardLayout, index_bytes, overlaps, parse_index

ALIGNMENT = 64
STATES = ("model/{}", "optimizer/exp_avg/{}", "optimizer/exp_avg_sq/{}")


def shapes_of(layers: int) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """Yield the name and shape of each parameter, and the dimension that tensor parallelism splits."""
    hidden, ffn, kv, vocab = 8192, 28672, 1024, 128256
    yield "embed.weight", (vocab, hidden), 0
    for layer in range(layers):
        for name, shape, dim in (("attention.q", (hidden, hidden), 0), ("attention.k", (kv, hidden), 0),
                                 ("attention.v", (kv, hidden), 0), ("attention.o", (hidden, hidden), 1),
                                 ("mlp.gate", (ffn, hidden), 0), ("mlp.up", (ffn, hidden), 0),
                                 ("mlp.down", (hidden, ffn), 1), ("norm.attention", (hidden,), None),
                                 ("norm.mlp", (hidden,), None)):  # fmt: skip
            yield f"layers.{layer}.{name}.weight", shape, dim
    yield "norm.weight", (hidden,), None
    yield "head.weight", (vocab, hidden), 0


def layouts_of(layers: int, shards: int, tp: int) -> tuple[tuple[ShardLayout, ...], dict[str, int]]:
    """Return the layout of each rank, and the bytes of each file. What tp ranks have in common the first one writes."""
    tensors = [*shapes_of(layers)]
    layouts, sizes = [], {}
    for rank in range(shards * tp):
        shard, part = divmod(rank, tp)
        rows, offset, file = [], 4096, f"rank-{rank:05d}.safetensors"
        for name, shape, dim in tensors:
            if dim is None and part:
                continue
            start, size = [0] * len(shape), list(shape)
            if dim is not None:
                size[dim] //= tp
                start[dim] = part * size[dim]
            block = -(-size[0] // shards)
            first = min(shard * block, size[0])
            start[0], size[0] = start[0] + first, min(block, size[0] - first)
            if not size[0]:
                continue
            for state in STATES:
                rows.append([state.format(name), "F32", list(shape), start, size, file, offset])
                offset += -(-4 * prod(size) // ALIGNMENT) * ALIGNMENT
        layouts.append(ShardLayout(f"digest of rank {rank}", tuple(rows)))
        sizes[file] = offset
    return tuple(layouts), sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--shards", type=int, default=512)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--plain", action="store_true")
    given = parser.parse_args()
    if given.plain:
        shard_index.MIN_COMPACT_ROWS = 1 << 62
    layouts, sizes = layouts_of(given.layers, given.shards, given.tp)
    row = {"ranks": len(layouts), "parts": sum(len(each.rows) for each in layouts), "plain": given.plain}
    began = time.process_time()
    text = index_bytes(layouts)
    row |= {"megabytes": round(len(text) / 1e6, 2), "write_cpu_seconds": round(time.process_time() - began, 2)}
    last, before = layouts[-1], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    del layouts
    index_bytes.cache_clear()
    began = time.process_time()
    index = parse_index(text, sizes)
    row["open_cpu_seconds"] = round(time.process_time() - began, 2)
    began = time.process_time()
    num = sum(
        len(overlaps(index[key].regions, tuple(start), tuple(size))) for key, _, _, start, size, _, _ in last.rows
    )
    assert num == len(last.rows)
    row["match_a_rank_cpu_seconds"] = round(time.process_time() - began, 2)
    row["open_mebibytes"] = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    print(json.dumps(row))


if __name__ == "__main__":
    main()
