"""AdamW over the parameters that a plan left on this rank."""

from torch import nn
from torch.optim import AdamW

from trimaran.core import TrainSection


def build_optimizer(module: nn.Module, train: TrainSection) -> AdamW:
    """Return a fused AdamW. Matrices are decayed; vectors (norms, biases) are not."""
    trained = [each for each in module.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim >= 2], "weight_decay": train.optimizer.weight_decay},
        {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0},
    ]
    constants = train.optimizer
    return AdamW(
        [group for group in groups if group["params"]],
        lr=train.lr,
        betas=(constants.beta1, constants.beta2),
        eps=constants.eps,
        fused=True,
    )
