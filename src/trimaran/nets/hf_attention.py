"""A part of each sequence in a Hugging Face model: its attention asks our context instead of looking around itself."""

from inspect import signature
from typing import Any

from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.nets.context import Context

try:
    from transformers import AttentionInterface
except ImportError:
    AttentionInterface = None

NAME = "trimaran"
STRANGE = ("dropout", "sliding_window", "softcap", "s_aux", "position_bias")  # what our attention cannot do
CONTEXT = "trimaran_context"  # the attribute of every module that may attend


def give_context(module: Any, context: Context) -> None:
    """Let the model hold a part of each sequence from now on; raise when its tokens meet other than in plain attention.

    Call it before the module's class changes: transformers looks at the source of that class.
    """
    if why := _unlike_ours(module):
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


def has_windows(module: Any) -> bool:
    """Return whether some layers do not look all the way back."""
    config = module.config.get_text_config()
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
    if strange := [name for name in STRANGE if isinstance(options.get(name), Tensor) or options.get(name)]:
        raise _unshared(module, f"attends with {strange[0]}")
    context = context_of(module)
    assert context is not None, "this attention is chosen by give_context, which gives a context"
    query, key = query.to(value.dtype), key.to(value.dtype)  # their rotation may have made them wider than they were
    out = context.attend(query, key, value, attention_mask, scale=options.get("scaling"))
    return out.transpose(1, 2).contiguous(), None


def _unlike_ours(module: Any) -> str:
    config = module.config.get_text_config()
    if has_windows(module):
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
