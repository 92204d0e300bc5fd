"""The fields of config.json about experts that several architectures have in common."""

from typing import Any

from trimaran.models.config_fields import Fields
from trimaran.models.layer_variations import RouterSpec
from trimaran.models.spec import ExpertSpec

# transformers ignores and preserves these fields, which only matter for training.
Z_LOSS, CAPACITY, CORRECTION_RATE = "router_z_loss_coef", "expert_capacity_factor", "router_bias_update_rate"
USUAL_RATE = 0.001  # DeepSeek-V3's


def read_losses(fields: Fields, *, balance: float, name: str = "router_aux_loss_coef") -> dict[str, Any]:
    """Return the fields of an `ExpertSpec` about training; `balance` is the architecture's usual weight of that loss.

    It becomes the weight of our per-sequence balance loss, unchanged.
    """
    return {
        "balance": fields.number(name, default=balance),
        "z_loss": fields.number(Z_LOSS, default=0.0),
        "capacity": fields.number(CAPACITY, default=0.0),
    }


def write_losses(experts: ExpertSpec, *, name: str = "router_aux_loss_coef") -> dict[str, Any]:
    """Return the fields of config.json that `read_losses` reads; those that are off are left out."""
    extras = {Z_LOSS: experts.z_loss, CAPACITY: experts.capacity}
    return {name: experts.balance} | {key: value for key, value in extras.items() if value}


def read_corrected_router(fields: Fields) -> RouterSpec:
    """Return the router of DeepSeek-V3 and GLM-4.5: sigmoid scores, groups, and a correction bias."""
    groups = fields.integer("n_group", default=1)
    top_groups = fields.integer("topk_group", default=1)
    return RouterSpec(
        scoring="sigmoid",
        groups=groups,
        top_groups=top_groups,
        group_top=2 if groups > top_groups else 1,
        scale=fields.number("routed_scaling_factor", default=1.0),
        correction=True,
        correction_rate=fields.number(CORRECTION_RATE, default=USUAL_RATE),
    )


def read_shared_experts(fields: Fields, router: RouterSpec, *, balance: float, normalize: bool) -> ExpertSpec:
    """Return the experts of DeepSeek and GLM: shared ones as wide as the others, and some dense layers first."""
    width = fields.integer("moe_intermediate_size")
    layers, dense = fields.integer("num_hidden_layers"), fields.integer("first_k_dense_replace", default=0)
    return ExpertSpec(
        num_experts=fields.integer("n_routed_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        ffn=width,
        shared_ffn=width * fields.integer("n_shared_experts", default=0),
        normalize_top_k=normalize,
        router=router,
        dense_layers=tuple(range(min(layers, dense))),
        **read_losses(fields, balance=balance, name="aux_loss_alpha"),
    )


def write_shared_experts(experts: ExpertSpec) -> dict[str, Any]:
    """Return the fields of config.json that `read_shared_experts` and `read_corrected_router` read."""
    router = experts.router
    return write_losses(experts, name="aux_loss_alpha") | {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn,
        "n_shared_experts": experts.shared_ffn // experts.ffn,
        "norm_topk_prob": experts.normalize_top_k,
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "first_k_dense_replace": len(experts.dense_layers),
        CORRECTION_RATE: router.correction_rate,
    }
