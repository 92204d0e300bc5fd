"""Lets layers compute projections of the same input as one matmul; the optimizer updates each parameter by itself."""

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from trimaran.core import RECOMPUTED_BY_OPERATOR, Plan
from trimaran.nets import Attention, Decoder, DecoderLayer, ExpertWeights, FeedForward, Network, RMSNorm, own_dtype
from trimaran.parallel.mesh import recompute_of, tower_of_blocks

# Modules that autocast runs in 16 bits, so that nothing reads the weight in fp32. Embeddings are not among them: their
# rows are read as they are, and the many gradients of one row are better summed in fp32.
MATMUL_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, ExpertWeights)


def matmul_weights(network: Network) -> Iterator[nn.Parameter]:
    """Yield trained matrices that only 16-bit matmuls read, not those of modules with own dtypes or shared ones."""
    num_owners: dict[int, int] = {}
    modules = list(network.module.modules())
    for module in modules:
        for each in module.parameters(recurse=False):
            num_owners[id(each)] = num_owners.get(id(each), 0) + 1
    in_fp32 = network.uncalled_linears()
    for module in modules:
        if isinstance(module, MATMUL_MODULES) and own_dtype(module) is None and module not in in_fp32:
            for each in module.parameters(recurse=False):
                if each.ndim >= 2 and each.requires_grad and num_owners[id(each)] == 1:
                    yield each


def apply_joint_projections(networks: Sequence[Network], plan: Plan) -> None:
    """Join projections, once filled and cast, whose weights only matmuls read, but not under recompute by operator."""
    matrices = {each for network in networks for each in matmul_weights(network)}
    on_cpu = all(each.is_cpu for each in matrices)
    if not (plan.joins_projections_on_cpu if on_cpu else plan.joins_projections):
        return
    for decoder in (each for network in networks for each in network.module.modules() if isinstance(each, Decoder)):
        if type(decoder.norm) is RMSNorm:
            decoder.norm.fused = own_dtype(decoder.norm) is None and not has_hooks([decoder.norm])
    blocks = [pair for network in networks for pair in tower_of_blocks(network)]
    for tower, layer in blocks:
        if not isinstance(layer, DecoderLayer) or recompute_of(tower, plan) in RECOMPUTED_BY_OPERATOR:
            continue
        norms = layer.plain_norms
        layer.joint = bool(norms) and all(own_dtype(each) is None for each in layer.modules()) and not has_hooks(norms)
        for part in (each for each in layer.modules() if isinstance(each, Attention | FeedForward)):
            linears = (*part.projections, *([part.down_proj] if isinstance(part, FeedForward) else []))
            weights = (getattr(each, "weight", None) for each in linears)  # 4-bit layers have none
            if (
                layer.joint
                and part.projections
                and all(each in matrices for each in weights)
                and not has_hooks(linears)
            ):
                part.join_projections()
        # The whole layer is fused if its projections and norms are joint, and no module in it has hooks.
        is_joint = layer.joint and layer.self_attn.joint and isinstance(layer.mlp, FeedForward) and layer.mlp.joint
        is_joint = is_joint and not has_hooks(each for each in layer.modules() if each is not layer)
        layer.fused = on_cpu and layer.is_fusible and is_joint and layer.self_attn.o_proj.weight in matrices


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules has hooks, which run only if the module itself is called."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(each, kind) for each in modules for kind in kinds)
