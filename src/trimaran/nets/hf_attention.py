"""Our attention in a Hugging Face model: it asks a context which positions are here, and documents need no mask."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.nets.attention_context import Context
from trimaran.nets.varlen_attention import Segments, attention, segment_attention

try:
    from transformers import AttentionInterface
except ImportError:
    AttentionInterface = None

NAME = "trimaran"
PACKED = "trimaran_flash"  # transformers asks a kernel of this name for all images at once, not for each by itself
STRANGE = ("dropout", "sliding_window", "softcap", "s_aux", "position_bias")  # what our attention cannot do
CONTEXT = "trimaran_context"  # the attribute of every module that may attend
SIGHT = "trimaran_sight"  # the argument that says who may look at whom, from the model's call down to its attention
SIGHTED = "trimaran_sighted"  # the attribute of a model that passes this argument on


def give_context(module: Any, context: Context) -> None:
    """Let the model hold a part of each sequence from now on; raise when its tokens meet other than in plain attention.

    Call it before the module's class changes: transformers looks at the source of that class.
    """
    if why := unlike_ours(module):
        raise _unshared(module, why)
    assert AttentionInterface is not None, "there is no model without transformers"
    AttentionInterface.register(NAME, _attend)
    module.set_attn_implementation(NAME)
    if module.config._attn_implementation != NAME:  # transformers only warns
        raise _unshared(module, "has attention of its own")
    for part in module.modules():
        setattr(part, CONTEXT, context)


def context_of(module: nn.Module) -> Context | None:
    """Return what `give_context` gave, if anything."""
    return getattr(module, CONTEXT, None)


def give_attention(module: Any) -> None:
    """Give our attention to a model that passes SIGHT on to it. Then no mask is made, of documents neither."""
    give_context(module, Context())
    setattr(module, SIGHTED, True)


def pack_images(vision: Any) -> None:
    """Let a tower of a model that has our attention tell it where each image ends: `Segments` as `cu_seqlens`."""
    assert AttentionInterface is not None, "there is no model without transformers"
    AttentionInterface.register(PACKED, _attend)
    vision.config._attn_implementation = PACKED  # its setter would look for a package that has such a kernel


def is_sighted(module: nn.Module) -> bool:
    """Return whether the model takes the argument SIGHT in place of a mask."""
    return getattr(module, SIGHTED, False)


def has_windows(config: Any) -> bool:
    """Return whether some layers of a model do not look all the way back."""
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    return bool(getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return what each query gathers, [B, T, heads, head_dim], as transformers expects it of an attention function."""
    # What a config does not tell, the call does.
    if strange := strange_option(options):
        raise _unshared(module, f"attends with {strange}")
    context = context_of(module) or Context()  # another model of the same configuration was given none
    query, key = query.to(value.dtype), key.to(value.dtype)  # their rotation may have made them wider than they were
    sight, scale = options.get(SIGHT), options.get("scaling")
    if isinstance(images := options.get("cu_seq_lens_q"), Segments):
        out = segment_attention(query, key, value, images, causal=False, scale=scale)
    elif looks_ahead(module, options):
        out = attention(query, key, value, attention_mask, causal=False, scale=scale)
    else:
        out = context.attend(query, key, value, attention_mask if sight is None else sight, scale=scale)
    return out.transpose(1, 2).contiguous(), None


def strange_option(options: Mapping[str, Any]) -> str:
    """Return what in the options of a call our attention cannot do, or nothing."""
    return next((name for name in STRANGE if isinstance(options.get(name), Tensor) or options.get(name)), "")


def looks_ahead(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Return whether tokens see those behind them, as the call says, or else the module."""
    causal = options.get("is_causal")
    return not (getattr(module, "is_causal", True) if causal is None else causal)


def unlike_ours(module: Any) -> str:
    """Return why the model's attention is not the plain one, as far as its configuration tells."""
    config = module.config.get_text_config()
    if has_windows(module.config):
        return "does not look all the way back in every layer"
    if getattr(config, "attn_logit_softcapping", None):
        return "caps its attention scores"
    if module.training and (getattr(config, "attention_dropout", 0) or getattr(config, "attn_pdrop", 0)):
        return "drops attention at random"
    if any(isinstance(part, nn.Conv1d) for part in module.modules()):
        return "mixes tokens with a convolution as well"
    if any(name.endswith(".sinks") for name, _ in module.named_parameters()):
        return "has attention sinks"
    if "position_ids" not in signature(module.forward).parameters:
        return "takes no positions"
    return "" if getattr(module, "_supports_attention_backend", False) else "has attention of its own"


def _unshared(module: nn.Module, why: str) -> UserError:
    fix = "set cp to 1; plan.recompute=full and a smaller micro-batch make room for long sequences"
    return UserError("M028", f"{type(module).__name__} {why}", where="plan.mesh.cp", fix=fix)
