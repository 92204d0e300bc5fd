"""torch's optimizer without what keeps torch.compile out of it, which imports the compiler: a second for each rank."""

from inspect import unwrap

from torch.optim import Optimizer


class EagerOptimizer(Optimizer):
    """An optimizer whose methods are never compiled."""

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)
