"""Our attention inside a Hugging Face model: it supports context parallelism, and documents need no mask."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.nets.decoder.attention_context import Context
from trimaran.nets.decoder.key_value_cache import CacheExtension
from trimaran.nets.paged_cache import PagedExtension
from trimaran.nets.varlen_attention import AttentionOptions, Segments, attention, segment_attention

# None if it is not installed, which `hf_config` refuses.
transformers: Any = import_module("transformers") if find_spec("transformers") else None
NAME = "trimaran"
# Kinds of layers, in a config's `layer_types`, that a mask keeps within documents.
CHUNKED = "chunked_attention"
ISOLATING_LAYERS = frozenset({"full_attention", "sliding_attention", CHUNKED})
CHUNK_SIZES = ("attention_chunk_size", "floor_scale")  # of Llama 4, which scales scores by the position in the row
WITHOUT_PAIR_MASKS = frozenset({"openai-gpt", "xlm"})  # kinds of models that take no mask for pairs of tokens
PACKED = "trimaran_flash"  # transformers calls a kernel of this name once for all images, not per image
UNSUPPORTED_OPTIONS = ("dropout", "sliding_window", "softcap", "s_aux", "position_bias")  # by our attention
CONTEXT = "trimaran_context"  # the attribute of every module that may attend
SCOPE_ARGUMENT = "trimaran_scope"  # carries the attention scope from the model's call to its attention
MIXING_ATTRIBUTE = "trimaran_mixing_reason"  # the attribute of a model that holds the result of `mixing_reason`
OPTION_ATTRIBUTE = "trimaran_unsupported_option"  # the attribute of a model that a trial call found to attend with one
SCOPE_ATTRIBUTE = "trimaran_takes_scope"  # the attribute of a model that passes this argument through


def set_context(module: Any, context: Context) -> None:
    """Use `context` in the model's attention. Raises if tokens interact other than through plain attention.

    Call it before the module's class changes: transformers inspects the source of that class.
    """
    if reason := attention_difference(module):
        raise _cp_unsupported(module, reason)
    option = getattr(module, OPTION_ATTRIBUTE, "")
    if option and (module.training or option != "dropout"):
        raise _cp_unsupported(module, f"attends with {option}")
    if not use_our_attention(module):
        raise _cp_unsupported(module, "has its own attention implementation")
    for part in module.modules():
        setattr(part, CONTEXT, context)


def context_of(module: nn.Module) -> Context | None:
    return getattr(module, CONTEXT, None)


def pack_images(vision: Any) -> None:
    """Make a vision tower pass image boundaries to our attention: `Segments` as `cu_seqlens`."""
    transformers.AttentionInterface.register(PACKED, _attend)
    vision.config._attn_implementation = PACKED  # its setter would look for a package with such a kernel


def takes_scope(module: nn.Module) -> bool:
    """Return whether the model takes the attention scope instead of a mask."""
    return getattr(module, SCOPE_ATTRIBUTE, False)


def has_windows(config: Any) -> bool:
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    return bool(getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None))


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return the attention output [B, T, heads, head_dim], as transformers expects of an attention function."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # RoPE may have upcast them
    if isinstance(pages := options.get(SCOPE_ARGUMENT), PagedExtension):  # one row with the new tokens of all sequences
        if is_noncausal(module, options) or options.get("position_bias") is not None:
            raise _cp_unsupported(module, "does not attend causally, or attends with a position bias")
        found = AttentionOptions(*(options.get(name) for name in ("scaling", "sliding_window", "softcap", "s_aux")))
        layer = pages.layer(module.layer_idx)  # pyrefly: ignore[bad-argument-type]
        return layer.attend(query, key, value, found).transpose(1, 2).contiguous(), None
    # The call shows what the config does not.
    if option := unsupported_option(options):
        raise _cp_unsupported(module, f"attends with {option}")
    context = context_of(module) or Context()  # another model of the same configuration has none
    scope, scale = options.get(SCOPE_ARGUMENT), options.get("scaling")
    if isinstance(scope, CacheExtension):
        scope = scope.layer(module.layer_idx)  # pyrefly: ignore[bad-argument-type]
    if isinstance(images := options.get("cu_seq_lens_q"), Segments):
        out = segment_attention(query, key, value, images, causal=False, scale=scale)
    elif is_noncausal(module, options):
        out = attention(query, key, value, attention_mask, causal=False, scale=scale)
    else:
        out = context.attend(query, key, value, attention_mask if scope is None else scope, AttentionOptions(scale))
    return out.transpose(1, 2).contiguous(), None


def use_our_attention(module: Any) -> bool:
    """Attend with our attention, and return whether that works; with windows, soft caps or sinks only to pages."""
    transformers.AttentionInterface.register(NAME, _attend)
    module.set_attn_implementation(NAME)
    return module.config._attn_implementation == NAME  # else transformers has only warned


def unsupported_option(options: Mapping[str, Any]) -> str:
    """Return the first option of a call that our attention does not support; empty if none."""
    given = {name: options.get(name) for name in UNSUPPORTED_OPTIONS}
    return first_true({name: isinstance(each, Tensor) or bool(each) for name, each in given.items()})


def is_noncausal(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Return whether attention is not causal, by the call's options or else by the module."""
    causal = options.get("is_causal")
    return not (getattr(module, "is_causal", True) if causal is None else causal)


def attention_difference(module: Any) -> str:
    """Return why the model's attention is not plain causal attention, from its configuration; empty if it is."""
    config = module.config.get_text_config()
    if has_windows(module.config):
        return "has attention windows"
    if getattr(config, "attn_logit_softcapping", None):
        return "has soft-capped attention scores"
    if module.training and (getattr(config, "attention_dropout", 0) or getattr(config, "attn_pdrop", 0)):
        return "has attention dropout"
    if any(isinstance(part, nn.Conv1d) for part in module.modules()):
        return "also mixes tokens with a convolution"
    if any(name.endswith(".sinks") for name, _ in module.named_parameters()):
        return "has attention sinks"
    if "position_ids" not in signature(module.forward).parameters:
        return "takes no position_ids"
    has_backend = getattr(module, "_supports_attention_backend", False)
    return "" if has_backend else "has its own attention implementation"


def uses_eager_attention(module: Any) -> bool:
    """Return whether the model runs its eager attention, which adds the mask to the scores."""
    return module.config._attn_implementation == "eager"


def mixing_reason(module: Any) -> str:
    """Return why no mask keeps the documents of a row apart in the model; empty if one does."""
    if takes_scope(module):
        return ""
    if not hasattr(module, MIXING_ATTRIBUTE):
        kinds = getattr(module.config.get_text_config(), "layer_types", None) or ()
        longest = longest_packed_row(module)
        reasons = {
            "takes no position_ids": "position_ids" not in signature(module.forward).parameters,
            "takes no mask for pairs of tokens": module.config.model_type in WITHOUT_PAIR_MASKS
            or getattr(module.config, "alibi", False),  # Falcon counts positions by a mask of single tokens
            "also mixes tokens with a convolution": any(isinstance(part, nn.Conv1d) for part in module.modules()),
            "has layers without attention scores": not ISOLATING_LAYERS.issuperset(kinds),
            f"counts chunks of {longest} tokens from the start of a row": longest > 0,
        }
        setattr(module, MIXING_ATTRIBUTE, first_true(reasons))
    return getattr(module, MIXING_ATTRIBUTE)


def first_line(error: Exception) -> str:
    """Return the kind of an error of a model's own code, and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def first_true(reasons: Mapping[str, bool]) -> str:
    """Return the first reason that applies; empty if none does."""
    return next((reason for reason, applies in reasons.items() if applies), "")


def longest_packed_row(module: Any) -> int:
    """Return the length up to which a model that mixes the documents of a row keeps them apart all the same."""
    config = module.config.get_text_config()
    if CHUNKED not in (getattr(config, "layer_types", None) or ()):
        return 0
    return min((size for each in CHUNK_SIZES if (size := getattr(config, each, None))), default=0)


def mixes_documents(reason: str, architecture: str) -> UserError:
    return UserError("M058.not-keep-documents", where="data", architecture=architecture, reason=reason)


def _cp_unsupported(module: nn.Module, reason: str) -> UserError:
    return UserError("M028.cannot-split", where="plan.mesh.cp", kind=type(module).__name__, reason=reason)
