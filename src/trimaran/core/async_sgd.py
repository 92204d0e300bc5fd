"""Asynchronous training with bounded staleness: what a plan with `engine: async` says about it."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class AsyncSgd(BaseModel):
    """How far workers of `engine: async` may run ahead of each other, and how often all of them pause.

    No gradient is applied more than `staleness` updates after the weights that it was computed from; 0 is synchronous
    training. Every `pause_every` updates all workers wait for each other: only then can the state be saved.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    staleness: Annotated[int, Field(ge=0, le=1000)] = 4
    pause_every: Annotated[int, Field(ge=1, le=10**6)] = 50
