"""The names of a decoder's modules, on paper, and the patterns that people match them with."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from trimaran.core import UserError, nearest
from trimaran.models.spec import ModelSpec

FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


def module_names(spec: ModelSpec) -> list[str]:
    """Return the name of every module of the decoder that `spec` describes."""
    names = ["embed_tokens", "layers", "norm", "lm_head"]
    for number in range(spec.layers):
        layer = f"layers.{number}"
        names += [layer, f"{layer}.input_layernorm", f"{layer}.self_attn", f"{layer}.post_attention_layernorm"]
        names += [f"{layer}.self_attn.{part}" for part in ATTENTION]
        names += [f"{layer}.mlp", *(f"{layer}.mlp.{part}" for part in _feed_forward(spec))]
    return names


def matches_module(name: str, pattern: str) -> bool:
    """Return whether the pattern fits, part by part: a star stands for one part of the name, or some of its letters."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and name != "" and all(map(fnmatchcase, parts, wanted))


def refuse_unmatched(patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raise for the first pattern of `train.precision` that fits none of the modules with these names."""
    for pattern in patterns:
        if not any(matches_module(name, pattern) for name in names):
            raise UserError("P033", f"no module is called {pattern!r}{nearest(pattern, names)}",
                            where="train.precision", fix="use the name of a module, such as "
                            f"{next(iter(names))}; a star stands for one part of it: layers.*.mlp")  # fmt: skip


def _feed_forward(spec: ModelSpec) -> list[str]:
    experts = spec.block.experts
    if experts is None:
        return list(FEED_FORWARD)
    names = ["gate", "experts"]
    if experts.shared_ffn:
        names += ["shared_expert", *(f"shared_expert.{part}" for part in FEED_FORWARD)]
    return names + ["shared_expert_gate"] * experts.shared_gate
