"""Finds the weights that nothing but a 16-bit matmul reads."""

from collections.abc import Iterator

from torch import nn

from trimaran.nets import Network
from trimaran.nets.module_dtype import own_dtype
from trimaran.nets.moe import ExpertWeights, MoeLayer
from trimaran.nets.vision import Stem

# Modules that autocast runs in 16 bits, so that nothing reads the weight in fp32. Embeddings are not among them: their
# rows are read as they are, and the many gradients of one row are better summed in fp32.
MATMUL_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, ExpertWeights)
# Weights of such modules that are used in fp32 after all: a router computes in fp32, and a stem first sums its patch
# weights over frames.
FP32_MODULES: tuple[tuple[type[nn.Module], str], ...] = ((MoeLayer, "gate"), (Stem, "patch_embed"))


def matmul_weights(network: Network) -> Iterator[nn.Parameter]:
    """Yield the trained matrices that only 16-bit matmuls read.

    A module with its own dtype in the recipe may compute in fp32. A matrix that two modules share is also an embedding.
    """
    num_owners: dict[int, int] = {}
    modules = list(network.module.modules())
    for module in modules:
        for each in module.parameters(recurse=False):
            num_owners[id(each)] = num_owners.get(id(each), 0) + 1
    in_fp32 = {getattr(each, name) for each in modules for kind, name in FP32_MODULES if isinstance(each, kind)}
    for module in modules:
        if isinstance(module, MATMUL_MODULES) and own_dtype(module) is None and module not in in_fp32:
            for each in module.parameters(recurse=False):
                if each.ndim >= 2 and each.requires_grad and num_owners[id(each)] == 1:
                    yield each
