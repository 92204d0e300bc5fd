"""A decoder as a torchtitan model: one of its flavors, or its Llama 3 or Qwen 3 in another shape."""

from dataclasses import replace

from trimaran.models import PRESETS, ModelSpec, Rope
from trimaran.models.spec import variations
from trimaran.planner.emit.emission import unknown_model

# Its flavors that equal one of our presets in every field (torchtitan 0.2.2, models/{llama3,qwen3}/__init__.py).
FLAVORS = {
    "llama-3.1-8b": ("llama3", "8B"),
    "llama-3.1-70b": ("llama3", "70B"),
    "llama-3.1-405b": ("llama3", "405B"),
    "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B"),
    "qwen3-4b": ("qwen3", "4B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"),
    "qwen3-32b": ("qwen3", "32B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
}
LLAMA = '''"""{name}: torchtitan's Llama 3 in another shape."""

from dataclasses import replace

from torchtitan.models.llama3 import get_train_spec
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.protocols.train_spec import register_train_spec

shape = TransformerModelArgs(
    dim={dim},
    n_layers={layers},
    n_heads={heads},
    n_kv_heads={kv_heads},
    vocab_size={vocab},
    multiple_of={ffn},  # half of the feed-forward, rounded up to a multiple of all of it
    ffn_dim_multiplier={half!r},
    norm_eps={eps!r},
    rope_theta={theta!r},
    rope_scaling_args=RoPEScalingArgs({factor!r}, {low!r}, {high!r}, {original}),
)
register_train_spec("{module}", replace(get_train_spec(), model_args={{"{name}": shape}}))
'''
QWEN = '''"""{name}: torchtitan's Qwen 3 in another shape."""

from dataclasses import replace

from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import get_train_spec
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.train_spec import register_train_spec

shape = Qwen3ModelArgs(
    dim={dim},
    n_layers={layers},
    n_heads={heads},
    n_kv_heads={kv_heads},
    head_dim={head_dim},
    hidden_dim={ffn},
    vocab_size={vocab},
    norm_eps={eps!r},
    rope_theta={theta!r},
    qk_norm={qk_norm},
    enable_weight_tying={tied},{experts}
)
register_train_spec("{module}", replace(get_train_spec(), model_args={{"{name}": shape}}))
'''
EXPERTS = """
    moe_enabled=True,
    moe_inter_dim={ffn},
    moe_args=MoEArgs(
        num_experts={num_experts},
        num_shared_experts={shared},
        top_k={top_k},
        score_func="softmax",
        route_norm={normalize},
        score_before_experts=False,
    ),"""


def flavor_of(spec: ModelSpec) -> str | None:
    """Return the preset that equals `spec` in all but name and longest sequence, if torchtitan has it; else None."""
    for preset in FLAVORS:
        if replace(spec, name=preset, max_seq_len=PRESETS[preset].max_seq_len) == PRESETS[preset]:
            return preset
    return None


def is_llama(spec: ModelSpec) -> bool:
    """Return whether this is a Llama, the only one of the two with pipeline parallelism."""
    plain = not (spec.tied or spec.block.qk_norm or spec.block.experts)
    return plain and spec.heads * spec.head_dim == spec.hidden


def refuse_network(tool: str, spec: ModelSpec) -> None:
    """Raise for a decoder that is neither of the two."""
    block, experts = spec.block, spec.block.experts
    if beyond := variations(spec):
        raise unknown_model(tool, spec.name, f"it has no {', '.join(beyond)}")
    if block.qkv_bias:
        raise unknown_model(tool, spec.name, "its attention has no biases")
    if not is_llama(spec) and block.rope.factor != 1:
        raise unknown_model(tool, spec.name, "only its Llama 3 scales RoPE, and that one has no tied embedding")
    if experts and (experts.shared_gate or experts.shared_ffn % experts.ffn or experts.capacity):
        raise unknown_model(tool, spec.name, "its experts have no shared gate, no capacity, and one width")


def own_flavor(module: str, spec: ModelSpec) -> str:
    """Return the Python module that registers the model under the module's name."""
    block, rope = spec.block, spec.block.rope
    common = {"module": module, "name": spec.name, "dim": spec.hidden, "layers": spec.layers, "heads": spec.heads,
              "kv_heads": spec.kv_heads, "vocab": spec.vocab, "ffn": spec.ffn, "eps": block.norm_eps,
              "theta": rope.theta}  # fmt: skip
    if is_llama(spec):
        half = spec.ffn / 2 / int(8 * spec.hidden / 3)  # of Llama's default width
        return LLAMA.format(**common, half=half, **_positions(rope))
    return QWEN.format(**common, head_dim=spec.head_dim, qk_norm=block.qk_norm, tied=spec.tied, experts=_experts(spec))


def _positions(rope: Rope) -> dict[str, float]:
    return {"factor": rope.factor, "low": rope.low_freq_factor, "high": rope.high_freq_factor,
            "original": rope.original_max_seq_len}  # fmt: skip


def _experts(spec: ModelSpec) -> str:
    if (experts := spec.block.experts) is None:
        return ""
    return EXPERTS.format(ffn=experts.ffn, num_experts=experts.num_experts, shared=experts.shared_ffn // experts.ffn,
                          top_k=experts.top_k, normalize=experts.normalize_top_k)  # fmt: skip
