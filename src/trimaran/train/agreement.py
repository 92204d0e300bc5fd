"""What all ranks agree on with every step (law 5): wishes are summed with the step's counts, and read a step later."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from trimaran.train.health.guard import Refusal

Wish = Literal["stop", "save", "profile"]
WISHES: tuple[Wish, ...] = ("stop", "save", "profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What the numbers of one step say, alike on every rank.

    `refusal` says why its update was not applied, unless that was no trouble (see `Guard.read`). `bad_data`: too many
    samples could not be used.
    """

    stop: bool = False
    save: bool = False
    profile: bool = False
    bad_data: bool = False
    refusal: Refusal | None = None

    @property
    def ending(self) -> "Ending | None":
        """How training ends because of this; None when it goes on."""
        match self.refusal:
            case Refusal(action="rewind"):
                return Ending(step=self.refusal.good_step, reason="rewind", refusal=self.refusal)
            case Refusal(action="stop"):
                return Ending(step=self.refusal.step, reason="numeric", refusal=self.refusal)
        if self.bad_data:
            return Ending(reason="data")
        return Ending(reason="stop") if self.stop else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a stretch of training ended: `step` steps are done.

    After `rewind` it goes on from there or from an earlier step: all that came after is to be forgotten, `refusal` says
    why. `numeric`: the numbers went wrong and there is no way on. `data`: so did the samples.
    """

    reason: Literal["done", "stop", "rewind", "numeric", "data"]
    step: int = 0
    refusal: Refusal | None = None

    @property
    def is_sound(self) -> bool:
        """Whether the weights are what they should be. They are after a refused step, but not once replicas differ."""
        return self.refusal is None or not self.refusal.spoilt


class Poll:
    """A question to all ranks, on its way while something else is computed: does any of them wish it?

    It goes through the CPU, where nobody has to wait for the device.
    """

    def __init__(self, wish: bool) -> None:
        self._votes = torch.tensor([int(wish)])
        self._counting = dist.all_reduce(self._votes, async_op=True)

    def wait(self) -> bool:
        """Return the answer, the same on every rank."""
        if self._counting is not None:
            self._counting.wait()
        return bool(self._votes)
