"""How a Hugging Face model is sharded: its tensor-parallel plan, and stacked experts that are spread over ranks."""

import re
from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.models import every_rank_has_rows
from trimaran.nets.decoder.scattered_rows import gather_rows, scatter_rows, sorted_places
from trimaran.nets.local_shards import with_local_parameters

SPREAD_ATTRIBUTE = "trimaran_spread_experts"  # of experts that are spread over ranks
# Set by transformers on every module of stacked experts that is called with rows, choices and weights.
INTERFACE = ("num_experts", "has_gate", "has_bias", "is_transposed", "_is_expert_parallel")
HfDispatch = Callable[[Any, Tensor, Tensor], Tensor]
# The style of a module in transformers, and ours. Between a colwise and a rowwise module, both hold a rank's own heads
# or columns.
STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "replicated_with_grad_allreduce": "heads",
    "replicate": "replicated",
    "colwise_gather_output": "foreign-colwise-gathered",
    "rowwise_split_input": "foreign-rowwise-taken",
    "moe_tp_experts": "foreign-experts",
    "grouped_gemm": "foreign-experts",
}
# Plans for models that transformers has none for, by model type and name pattern in the base model.
OUR_PLANS: dict[str, dict[str, str]] = {
    "gpt2": {
        "h.*.attn.c_attn": "colwise_gather_output",
        "h.*.attn.c_proj": "rowwise_split_input",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }
}
# Models whose code cannot be sharded although transformers has a plan for it, by model type.
UNSUPPORTED = {"gemma4": "reads rows of its embedding, of which a rank has a part"}
CONV1D_STYLES = {"colwise": "foreign-colwise", "rowwise": "foreign-rowwise"}


def stacked_experts(module: nn.Module) -> list[nn.Module]:
    return [each for each in module.modules() if all(hasattr(each, name) for name in INTERFACE)]


def is_spread(module: nn.Module) -> bool:
    """Return whether the module holds this rank's part of experts that are spread over ranks."""
    return getattr(module, SPREAD_ATTRIBUTE, False)


def spreadable_experts(module: nn.Module) -> list[nn.Module]:
    """Return the modules of stacked experts. Raises UserError if there are none, or if they cannot be spread."""
    found: list[Any] = stacked_experts(module)
    if not found:
        raise _no_experts(module, "has no stacked experts in the form that transformers 5 gives them")
    for each in found:
        odd = [name for name, part in each.named_parameters() if "." in name or part.shape[0] != each.num_experts]
        if odd:
            raise _no_experts(module, f"has experts with {odd[0]}, which is not stacked by expert")
    return found


def count_experts(module: nn.Module) -> int:
    """Return the number of experts of each layer with stacked experts; if layers differ, what divides all of them."""
    counts: list[Any] = [each.num_experts for each in spreadable_experts(module)]
    return gcd(*counts)


def spread(experts: Any, dispatch: HfDispatch, degree: int, split: Callable[[nn.Module], None] | None = None) -> None:
    """Let experts, of which this rank holds a part, send rows with `dispatch` to the ranks of the experts they chose.

    The model's own code computes the experts of a rank, as if each row had chosen one expert with weight 1. If several
    ranks have the same rows, `split` lets each compute some of these experts.
    """
    num_experts = experts.num_experts
    here = experts.num_experts = num_experts // degree
    if split is not None:
        split(experts)
    own = experts.forward

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        numbers = torch.arange(len(rows), device=rows.device)
        chosen = torch.searchsorted(ends, numbers, right=True).clamp(max=here - 1)
        with with_local_parameters(experts):
            return own(rows, chosen.unsqueeze(1), rows.new_ones(len(rows), 1))

    @torch.compiler.disable  # the sizes depend on the data
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *others: Any) -> Tensor:
        assert not others, "experts take rows, choices and weights"
        flat, choices = hidden_states.flatten(0, -2), top_k_index.flatten(0, -2)
        places = sorted_places(choices.flatten()).view(choices.shape)
        counts = torch.bincount(choices.flatten(), minlength=num_experts)
        rows = dispatch(compute, scatter_rows(flat, places), counts)
        out = gather_rows(rows, places, top_k_weights.flatten(0, -2).to(rows.dtype))
        return out.to(hidden_states.dtype).view(hidden_states.shape)

    experts.forward = forward
    setattr(experts, SPREAD_ATTRIBUTE, True)


def _no_experts(module: nn.Module, reason: str) -> UserError:
    return UserError("M070.cannot-split", where="plan.mesh.ep", kind=type(module).__name__, reason=reason)


def hf_tensor_plan(module: Any, degree: int) -> tuple[dict[str, str], dict[str, int]]:
    """Return the style of every module with parameters, by name pattern, and the heads and widths that must divide.

    There is no sequence parallelism: transformers' attention would take a part of the sequence for all of it. Embedding
    and head are sharded along the vocabulary, in which the last ranks hold fewer rows if the degree does not divide it.
    Raises UserError if there is no tensor-parallel plan for the model.
    """
    if reason := UNSUPPORTED.get(module.config.model_type):
        raise _tp_unsupported(module, reason)
    ours = OUR_PLANS.get(module.config.model_type, {})
    theirs = {f"{module.base_model_prefix}.{pattern}": style for pattern, style in ours.items()}
    theirs |= dict(getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None) or {})
    # The styles of the embedding and the head, which agree if they are tied.
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    names = {id(part): name for name, part in module.named_modules()}
    tied = head is not None and head.weight is embedding.weight
    split_embedding = isinstance(embedding, nn.Embedding) and every_rank_has_rows(embedding.num_embeddings, degree)
    ends = {names[id(embedding)]: "embedding" if split_embedding else "replicated"}
    if isinstance(head, nn.Linear):
        split_head = split_embedding if tied else every_rank_has_rows(head.out_features, degree)
        ends[names[id(head)]] = "colwise-logits" if split_head else "replicated"
    wanted = {pattern: style for pattern, style in theirs.items() if pattern not in ends}
    if not wanted:  # a style for the head alone is not enough
        raise _tp_unsupported(module, "has no tensor-parallel plan")
    owners = {_pattern(name): part for name, part in module.named_modules() if _direct_parameters(part)}
    experts = {_pattern(name) for name, part in module.named_modules() if part in set(stacked_experts(module))}
    wanted = {pattern: style for pattern, style in wanted.items() if pattern.rpartition(".")[0] not in experts}
    modules = {_pattern(name) for name, _ in module.named_modules()}
    parameters = {_pattern(name) for name, _ in module.named_parameters()}
    for pattern, style in wanted.items():
        if pattern in parameters or (pattern in modules and style not in STYLES):
            raise _tp_unsupported(module, f"shards {pattern} in an unsupported style ({style})")
    named = {pattern: STYLES[wanted[pattern]] for pattern in owners if pattern in wanted}
    named |= {each: CONV1D_STYLES.get(style, style) for each, style in named.items() if hasattr(owners[each], "nf")}
    for pattern, style in named.items():
        count = getattr(owners[pattern], "num_experts", 0)
        if style == "foreign-experts" and any(each.shape[0] != count for each in _direct_parameters(owners[pattern])):
            raise _tp_unsupported(module, f"has experts in {pattern} that are not stacked by expert")
    plan = {pattern: ends.get(pattern) or named.get(pattern) or "" for pattern in owners}
    for pattern in [pattern for pattern, style in plan.items() if not style]:
        plan[pattern] = _unnamed(module, pattern, owners[pattern], named)
    widths = {pattern: width for pattern, style in named.items() if (width := _width(owners[pattern], style))}
    config = module.config.get_text_config()
    counts = {field: getattr(config, field, None) for field in ("num_attention_heads", "num_key_value_heads")}
    return plan, {field: count for field, count in counts.items() if isinstance(count, int)} | widths


def _unnamed(module: Any, pattern: str, part: nn.Module, named: Mapping[str, str]) -> str:
    """Return the style of a module that the plan omits. With a colwise sibling it gets only this rank's heads."""
    parent = pattern.rpartition(".")[0]
    siblings = [style for each, style in named.items() if each.rpartition(".")[0] == parent]
    if not pattern or any(True for _ in part.children()):
        raise _tp_unsupported(module, f"does not say how the parameters of {pattern or 'the model itself'} are sharded")
    if isinstance(part, nn.Conv1d):  # the module around it computes with its weights
        raise _tp_unsupported(module, f"does not say how the convolution {pattern} is sharded")
    if "foreign-experts" in siblings:
        return "foreign-replicated"  # a router, which returns more than one tensor
    if "colwise" not in siblings:
        return "replicated"
    config = module.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if all(each.shape == (head_dim,) for each in _direct_parameters(part)):
        return "heads"
    raise _tp_unsupported(module, f"does not say how {pattern} is sharded")


def _width(part: Any, style: str) -> int:
    """Return the width of a linear layer, or the number of experts, that its style shards; 0 if it shards none."""
    if style == "foreign-experts":
        return part.num_experts
    rows = "rowwise" in style
    if hasattr(part, "nf"):  # GPT-2's linear layer
        return part.nx if rows else part.nf
    return (part.in_features if rows else part.out_features) if isinstance(part, nn.Linear) else 0


def _direct_parameters(part: nn.Module) -> list[nn.Parameter]:
    return list(part.parameters(recurse=False))


def _pattern(name: str) -> str:
    """Return the name with a star for each number between dots, as in transformers' plans."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _tp_unsupported(module: nn.Module, reason: str) -> UserError:
    return UserError("M026.cannot-split", where="plan.mesh.tp", kind=type(module).__name__, reason=reason)
