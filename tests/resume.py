"""A run in legs: each under a plan of its own, each goes on from what the one before has kept."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trimaran.checkpoint.load_state import fill, refuse_leftovers
from trimaran.checkpoint.ownership import own
from trimaran.checkpoint.rank_share import TORCH_DTYPES, copy_in, copy_out, lay_out, view_of, whole_of
from trimaran.checkpoint.tensor_regions import Entry, Index, TensorRegion, Whole
from trimaran.checkpoint.tensor_shards import State, TensorShard
from trimaran.core import Plan, Recipe
from trimaran.data.feed import DataShare
from trimaran.data.step_batch import StepBatch, text_batch
from trimaran.optim.schedule import learning_rate
from trimaran.parallel import RankMesh, build_mesh
from trimaran.train.build import build_stepper
from trimaran.train.metrics.step_clock import Clock
from trimaran.train.networks import build_networks
from trimaran.train.process.rank_info import join, read_rank_info

SHAPE = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64}
LEG = 2  # steps under each plan


def recipe_for(preset: str = "tiny", *, shape: dict[str, Any] | None = None, **train: Any) -> Recipe:
    settings = {"steps": 40, "global_batch": 12, "lr": 3e-3, "seed": 3, "schedule": {"warmup_steps": 2}}
    model = {"preset": preset, "shape": SHAPE | (shape or {})}
    return Recipe.model_validate({"model": model, "data": {"seq_len": 16}, "train": settings | train})


@dataclass(frozen=True)
class Held:
    """A rectangle of a tensor as bytes, which any process can take."""

    key: str
    whole: Whole
    start: tuple[int, ...]
    size: tuple[int, ...]
    values: bytes

    @property
    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.values), dtype=TORCH_DTYPES[self.whole.dtype]).view(self.size)


class Kept:
    """The shares of all ranks as a source, without a disk."""

    def __init__(self, step: int, shares: Sequence[Sequence[Held]], progress: dict[str, Any]) -> None:
        self.step, self.progress = step, progress
        self.index: Index = {}
        self._values: dict[tuple[str, tuple[int, ...]], Held] = {}
        for rank, held in enumerate(shares):
            for each in held:
                before = self.index.get(each.key)
                parts = before.parts if before else ()
                part = TensorRegion(each.start, each.size, f"rank-{rank}", 0)
                self.index[each.key] = Entry(each.whole, (*parts, part))
                self._values[each.key, each.start] = each

    def read(self, key: str, part: TensorRegion) -> torch.Tensor:
        return self._values[key, part.start].tensor

    def whole(self, key: str) -> torch.Tensor:
        """Return a tensor put together, and fail where parts leave a gap or overlap."""
        entry = self.index[key]
        assert sum(part.num_values for part in entry.parts) == prod(entry.whole.shape), f"{key} is not covered"
        value = torch.zeros(entry.whole.shape, dtype=TORCH_DTYPES[entry.whole.dtype])
        for part in entry.parts:
            value[window(part.start, part.size)] = self.read(key, part)
        return value


@dataclass(frozen=True)
class Leg:
    """What a leg brought: its losses, what every rank held once it had loaded, what was kept midway and at the end."""

    losses: list[float]
    loaded: list[list[Held]]
    midway: Kept
    kept: Kept

    def assert_loaded(self, kept: Kept) -> None:
        """Fail unless every rank held, bit by bit, its rectangle of what was kept, and together they held all."""
        for held in (each for rank in self.loaded for each in rank):
            theirs = kept.whole(held.key)[window(held.start, held.size)]
            assert torch.equal(bits(held.tensor), bits(theirs)), f"{held.key} from {held.start}"
        assert {held.key for rank in self.loaded for held in rank} == kept.index.keys()

    def assert_same_end(self, other: "Leg") -> None:
        """Fail unless both legs kept the same, bit by bit."""
        assert self.losses == other.losses
        assert self.kept.index.keys() == other.kept.index.keys()
        for key in self.kept.index:
            assert torch.equal(bits(self.kept.whole(key)), bits(other.kept.whole(key))), key
        assert self.kept.progress == other.kept.progress


def sail_leg(recipe: Recipe, plan: Plan, *, steps: int, after: Kept | None = None) -> Leg:
    """Train `steps` steps in forked ranks, from the start or from what was kept."""
    start = after.step if after else 0
    answers = run_ranks(plan.mesh.world_size, _leg, recipe, plan, after, range(start, start + steps))
    return _collected(answers, start, steps)


def sail_leg_here(recipe: Recipe, plan: Plan, *, steps: int, after: Kept | None = None) -> Leg:
    """Train in this process, on its first device: what is forked from one that has touched a GPU cannot use it."""
    start = after.step if after else 0
    return _collected([_leg(recipe, plan, after, range(start, start + steps))], start, steps)


def _collected(answers: Sequence[Any], start: int, steps: int) -> Leg:
    losses, loaded, *kept = zip(*answers, strict=True)
    assert all(each == losses[0] for each in losses), "ranks differ in the loss"
    midway, end = (_together(at, each) for at, each in zip((start + steps // 2, start + steps), kept, strict=True))
    return Leg(losses[0], list(loaded), midway, end)


def _together(step: int, answers: Sequence[tuple[list[Held], dict[str, Any]]]) -> Kept:
    shares, progress = zip(*answers, strict=True)
    assert all(each == progress[0] for each in progress), "ranks differ in their progress"
    return Kept(step, shares, progress[0])


def _leg(recipe: Recipe, plan: Plan, after: Kept | None, steps: range) -> tuple[list[float], list[Held], Any, Any]:
    place = read_rank_info(os.environ)
    if not dist.is_initialized():
        join(place)
    ranks = build_mesh(plan.mesh, device_type=place.device.type)
    networks = build_networks(recipe, plan, place, ranks)
    stepper = build_stepper(networks, recipe.train, plan, ranks, Clock(place.device))
    stepper.set_training(True)
    state = stepper.state(recipe.train)
    if after is not None:
        load(state, after)
    state.gather()
    loaded = [held(piece) for piece in state.pieces()]
    losses, midway = [], None
    for step in steps:
        if step == steps.start + len(steps) // 2:
            midway = (share_of(state), state.progress())
        ranks.reseed(recipe.train.seed, step)
        numbers = stepper.step(batch_of(step, recipe, plan, ranks).to(place.device))
        stepper.update(learning_rate(step, recipe.train))
        losses.append(numbers[0].item())
    return losses, loaded, midway, (share_of(state), state.progress())


def load(state: State, source: Kept) -> None:
    pieces = state.pieces_from(source.index)
    fill(pieces, source)
    refuse_leftovers(pieces, source, gather=gather)
    state.restore(source.progress)


def share_of(state: State) -> list[Held]:
    """Return what this rank alone would write, by way of the flat memory that it is written from."""
    state.gather()
    pieces = state.pieces()
    share = lay_out(pieces, own(pieces, rank=dist.get_rank(), world_size=dist.get_world_size(), gather=gather))
    memory = torch.zeros(share.num_bytes, dtype=torch.uint8)
    copy_in(share, pieces, memory)
    return [Held(each.key, each.whole, each.start, each.size, to_bytes(view_of(memory, each))) for each in share.items]


def held(piece: TensorShard) -> Held:
    values = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype)
    copy_out(piece.tensor, values)
    return Held(piece.key, whole_of(piece), piece.start, tuple(piece.tensor.shape), to_bytes(values))


def batch_of(step: int, recipe: Recipe, plan: Plan, ranks: RankMesh) -> StepBatch:
    """Return this rank's part of a global batch that depends on the step alone. Rows have very uneven valid tokens."""
    share = DataShare(rank=ranks.data_rank, dp=plan.mesh.dp, micro_batch=plan.micro_batch, grad_accum=plan.grad_accum)
    rows, length = recipe.train.global_batch, recipe.data.seq_len
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(96, (rows, length + 1), generator=draw)
    labels = tokens[:, 1:].clone()
    labels[torch.arange(length)[None] >= torch.randint(length // 2, length + 1, (rows, 1), generator=draw)] = -100
    mine = torch.from_numpy(share.indices(step) - step * rows)
    tokens, labels = tokens[:, :-1][mine], labels[mine]
    return text_batch(step, tokens, labels)


def gather(row: np.ndarray) -> np.ndarray:
    mine = torch.from_numpy(row)
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return torch.stack(everybody).numpy()


def window(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + extent) for first, extent in zip(start, size, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits, so that a number that is none equals itself and -0 is not 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def to_bytes(tensor: torch.Tensor) -> bytes:
    return bits(tensor.detach().cpu()).numpy().tobytes()
