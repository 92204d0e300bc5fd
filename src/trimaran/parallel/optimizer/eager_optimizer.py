"""The optimizers that ours are built on. Code that only uses an optimizer imports these, not how it updates."""

from inspect import unwrap

from torch import Tensor
from torch.optim import Optimizer

from trimaran.parallel.optimizer.split_weights import NO_SPLIT_WEIGHTS, SplitWeights


class EagerOptimizer(Optimizer):
    """An optimizer whose methods are never compiled.

    torch's has what keeps torch.compile out of it, and so imports the compiler: a second for each rank.
    """

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)


class SplitWeightsOptimizer(EagerOptimizer):
    """An optimizer that may own split weights, and multiplies the gradients by `factor` as it updates them.

    With `found_inf` 1 it skips the update. Both are tensors of one element on the weights' device.
    """

    split_weights: SplitWeights
    factor: Tensor | None
    found_inf: Tensor | None

    def wait(self) -> None:
        """Wait until states on the host or on disk have been copied back from the device."""
        raise NotImplementedError


def split_weights_of(optimizer: Optimizer) -> SplitWeights:
    """Return the split weights that an optimizer owns."""
    return optimizer.split_weights if isinstance(optimizer, SplitWeightsOptimizer) else NO_SPLIT_WEIGHTS
