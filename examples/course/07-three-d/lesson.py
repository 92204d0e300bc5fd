"""The first rank of Llama 3.1 70B on 64 GPUs, by hand: python examples/course/07-three-d/lesson.py"""

TP, DP, PP = 4, 4, 4
HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY = 8192, 28672, 64, 8, 128256
STAGES = [21, 20, 20, 19]  # layers; the first stage also has the embedding, the last one the head
SEQUENCES = 512
GIB = 2**30


def coordinates(rank):
    """Return stage, data-parallel rank and tensor slice: slices are neighbours, stages are furthest apart."""
    return rank // (DP * TP), rank // TP % DP, rank % TP


def main():
    print("rank  node  stage  data rank  slice")
    for rank in (0, 1, 4, 16, 63):
        print(f"{rank}  {rank // 8}  {'  '.join(map(str, coordinates(rank)))}")
    attention = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN * KV_HEADS // HEADS
    layer = attention + 3 * HIDDEN * FFN
    parameters = (STAGES[0] * layer + VOCABULARY * HIDDEN) / TP
    print(f"\nrank 0 has {STAGES[0]} layers and the embedding, cut in {TP}: {parameters / 1e9:.2f}B parameters")
    for name, size, split in [("gradients", 4, 1), ("gathered", 2, 1), ("optimizer", 8, DP), ("weights", 4, DP)]:
        shared = f" / {split} data ranks" if split > 1 else ""
        print(f"{name}: {size} bytes{shared}: {parameters * size / split / GIB:.1f} GiB")
    micro_batches = SEQUENCES // DP
    print(f"\nbubble: ({PP} - 1) / ({micro_batches} + {PP} - 1) = {(PP - 1) / (micro_batches + PP - 1):.1%}")


if __name__ == "__main__":
    main()
