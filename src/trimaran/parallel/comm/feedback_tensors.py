"""What compression remembers from step to step. A step changes it only once the step is accepted."""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

Shape = tuple[int, ...]


class FeedbackTensors:
    """One fp32 tensor by name, in one flat buffer, and what the step in progress would make of them."""

    def __init__(self, shapes: Mapping[str, Shape], device: torch.device) -> None:
        self.shapes = dict(shapes)
        self._sizes = [prod(shape) for shape in self.shapes.values()]
        self._flat = torch.zeros(sum(self._sizes), device=device)
        self.accepted = self._views(self._flat)
        self._next: Tensor | None = None
        self._next_views: dict[str, Tensor] = {}

    def propose(self, name: str) -> Tensor:
        """Return the tensor to write the value after this step to."""
        if self._next is None:
            self._next = self._flat.clone()  # a tensor that this step does not write stays as it is
            self._next_views = self._views(self._next)
        return self._next_views[name]

    def settle(self, refused: Tensor) -> None:
        """Take over what the step has proposed, unless it was refused (not 0) or is not finite. Never waits.

        A NaN or Inf would never go away, and the gradient of a refused step must not reach the weights later.
        """
        if self._next is not None:
            is_bad = (refused.to(self._flat.device) != 0) | ~self._next.sum().isfinite()
            torch.where(is_bad, self._flat, self._next, out=self._flat)
        self.discard()

    def discard(self) -> None:
        """Forget what the step has proposed."""
        self._next, self._next_views = None, {}

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split(self._sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
