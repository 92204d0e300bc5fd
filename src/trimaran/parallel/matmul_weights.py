"""Finds the weights that nothing but a 16-bit matmul reads."""

from collections.abc import Iterator

from torch import nn

from trimaran.nets import Network
from trimaran.nets.module_dtype import own_dtype
from trimaran.nets.moe import ExpertWeights, MoeLayer

# Modules that autocast runs in 16 bits, so that nothing reads the weight in fp32. Embeddings are not among them: their
# rows are read as they are, and the many gradients of one row are better summed in fp32.
MATMUL_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, ExpertWeights)


def matmul_weights(network: Network) -> Iterator[nn.Parameter]:
    """Yield the trained matrices that only 16-bit matmuls read.

    A module with its own dtype in the recipe may compute in fp32. A matrix that two modules share is also an embedding.
    """
    num_owners: dict[int, int] = {}
    modules = list(network.module.modules())
    for module in modules:
        for each in module.parameters(recurse=False):
            num_owners[id(each)] = num_owners.get(id(each), 0) + 1
    in_fp32 = set(fp32_modules(network))
    for module in modules:
        if isinstance(module, MATMUL_MODULES) and own_dtype(module) is None and module not in in_fp32:
            for each in module.parameters(recurse=False):
                if each.ndim >= 2 and each.requires_grad and num_owners[id(each)] == 1:
                    yield each


def fp32_modules(network: Network) -> Iterator[nn.Module]:
    """Yield the modules among MATMUL_MODULES that compute in fp32 after all: routers, and stems of vision towers.

    A stem first sums its patch weights over frames.
    """
    for each in network.module.modules():
        if isinstance(each, MoeLayer):
            yield each.gate
    if "vision" in network.towers:
        from trimaran.nets.vision import Stem  # noqa: PLC0415  networks without images do not need it

        yield from (each.patch_embed for each in network.module.modules() if isinstance(each, Stem))
