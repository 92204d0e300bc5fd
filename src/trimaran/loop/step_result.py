"""The numbers of an optimizer step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """The numbers of one optimizer step, over the global batch. Tensors on the device: reading one waits for it."""

    loss: Tensor
    grad_norm: Tensor
    num_tokens: Tensor

    @property
    def num_samples(self) -> Tensor:
        """The same as `num_tokens`, for losses that are counted by sample."""
        return self.num_tokens
