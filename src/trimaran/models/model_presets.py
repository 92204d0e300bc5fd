"""Decoder presets by name, from tiny to 405B, as published."""

from trimaran.models.rope import Rope
from trimaran.models.spec import Block, ExpertSpec, ModelSpec

_LLAMA_2 = Block()
_LLAMA_3 = Block(rope=Rope(theta=500_000.0))
_LLAMA_31 = Block(rope=Rope(theta=500_000.0, factor=8.0))
_LLAMA_32 = Block(rope=Rope(theta=500_000.0, factor=32.0))
_MISTRAL = Block(rope=Rope(theta=1_000_000.0))  # since its version 0.2, which has no window
_QWEN_25 = Block(norm_eps=1e-6, qkv_bias=True, rope=Rope(theta=1_000_000.0))
_QWEN_25_LARGE = Block(norm_eps=1e-5, qkv_bias=True, rope=Rope(theta=1_000_000.0))
_QWEN_3 = Block(norm_eps=1e-6, qk_norm=True, rope=Rope(theta=1_000_000.0))
_QWEN_3_30B, _QWEN_3_235B = (
    Block(
        norm_eps=1e-6,
        qk_norm=True,
        rope=Rope(theta=1_000_000.0),
        experts=ExpertSpec(num_experts=128, top_k=8, ffn=ffn, balance=0.001),
    )
    for ffn in (768, 1536)
)
_TINY_MOE = Block(experts=ExpertSpec(num_experts=8, top_k=2, ffn=96, shared_ffn=192, shared_gate=True))

# name, layers, hidden, heads, kv heads, head dim, ffn, vocab, max sequence, tied, block
_TABLE = (
    ("tiny", 4, 128, 4, 2, 32, 384, 320, 2048, True, Block()),
    ("tiny-moe", 4, 128, 4, 2, 32, 384, 320, 2048, True, _TINY_MOE),
    ("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 4096, False, _LLAMA_2),
    ("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000, 4096, False, _LLAMA_2),
    ("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000, 4096, False, _LLAMA_2),
    ("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192, False, _LLAMA_3),
    ("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256, 8192, False, _LLAMA_3),
    ("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, 131072, False, _LLAMA_31),
    ("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256, 131072, False, _LLAMA_31),
    ("llama-3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256, 131072, False, _LLAMA_31),
    ("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, 131072, True, _LLAMA_32),
    ("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256, 131072, True, _LLAMA_32),
    ("tinyllama-1.1b", 22, 2048, 32, 4, 64, 5632, 32000, 2048, False, _LLAMA_2),
    ("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32768, 32768, False, _MISTRAL),
    ("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936, 32768, True, _QWEN_25),
    ("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936, 131072, True, _QWEN_25),
    ("qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, 151936, 32768, True, _QWEN_25),
    ("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, 131072, False, _QWEN_25),
    ("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064, 131072, False, _QWEN_25_LARGE),
    ("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064, 131072, False, _QWEN_25_LARGE),
    ("qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064, 131072, False, _QWEN_25_LARGE),
    ("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, 40960, True, _QWEN_3),
    ("qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, 151936, 40960, True, _QWEN_3),
    ("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936, 40960, True, _QWEN_3),
    ("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, 40960, False, _QWEN_3),
    ("qwen3-14b", 40, 5120, 40, 8, 128, 17408, 151936, 40960, False, _QWEN_3),
    ("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936, 40960, False, _QWEN_3),
    ("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 6144, 151936, 40960, False, _QWEN_3_30B),
    ("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 12288, 151936, 40960, False, _QWEN_3_235B),
)

PRESETS: dict[str, ModelSpec] = {
    name: ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        max_seq_len=max_seq_len,
        tied=tied,
        block=block,
    )
    for name, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, max_seq_len, tied, block in _TABLE
}
