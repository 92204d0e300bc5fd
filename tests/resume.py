"""Trains a run in segments, each under its own plan and from the state that the one before has saved."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trimaran.checkpoint import fill_shards, refuse_unused_tensors
from trimaran.core import Plan, Recipe
from trimaran.data import DataShare, StepBatch, text_batch
from trimaran.parallel import (
    TORCH_DTYPES,
    CheckpointState,
    IndexEntry,
    RankMesh,
    TensorIndex,
    TensorMeta,
    TensorRegion,
    TensorShard,
    assign_rows,
    build_mesh,
    build_share,
    copy_to_memory,
    copy_values,
    item_view,
    learning_rate,
    meta_of,
)
from trimaran.train import (
    MAY_BE_UNUSED,
    StepClock,
    build_networks,
    build_stepper,
    features_of,
    join_process_group,
    read_rank_info,
)

SHAPE = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64}
SEGMENT_STEPS = 2


def recipe_for(preset: str = "tiny", *, shape: dict[str, Any] | None = None, **train: Any) -> Recipe:
    settings = {"steps": 40, "global_batch": 12, "lr": 3e-3, "seed": 3, "schedule": {"warmup_steps": 2}}
    model = {"preset": preset, "shape": SHAPE | (shape or {})}
    return Recipe.model_validate({"model": model, "data": {"seq_len": 16}, "train": settings | train})


@dataclass(frozen=True)
class HeldShard:
    """A shard of a tensor as bytes, to send between processes."""

    key: str
    meta: TensorMeta
    start: tuple[int, ...]
    size: tuple[int, ...]
    values: bytes

    @property
    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.values), dtype=TORCH_DTYPES[self.meta.dtype]).view(self.size)


class SavedState:
    """The shares of all ranks as a `CheckpointSource` in memory."""

    def __init__(self, step: int, shares: Sequence[Sequence[HeldShard]], progress: dict[str, Any]) -> None:
        self.step, self.progress = step, progress
        self.index: TensorIndex = {}
        self._values: dict[tuple[str, tuple[int, ...]], HeldShard] = {}
        for rank, held in enumerate(shares):
            for each in held:
                before = self.index.get(each.key)
                regions = before.regions if before else ()
                region = TensorRegion(each.start, each.size, f"rank-{rank}", 0)
                self.index[each.key] = IndexEntry(each.meta, (*regions, region))
                self._values[each.key, each.start] = each

    def read(self, key: str, region: TensorRegion) -> torch.Tensor:
        return self._values[key, region.start].tensor

    def full_tensor(self, key: str) -> torch.Tensor:
        """Return a full tensor; fail if its regions leave a gap or overlap."""
        entry = self.index[key]
        assert sum(each.num_values for each in entry.regions) == prod(entry.meta.shape), f"{key} is not covered"
        value = torch.zeros(entry.meta.shape, dtype=TORCH_DTYPES[entry.meta.dtype])
        for region in entry.regions:
            value[window(region.start, region.size)] = self.read(key, region)
        return value


@dataclass(frozen=True)
class TrainedSegment:
    """The result of a segment: losses, the shards of every rank after loading, the state midway and at the end."""

    losses: list[float]
    loaded: list[list[HeldShard]]
    midway: SavedState
    saved: SavedState

    def assert_loaded(self, saved: SavedState) -> None:
        """Fail unless the ranks loaded every tensor of `saved`, each its own shard, bit for bit."""
        for held in (each for rank in self.loaded for each in rank):
            theirs = saved.full_tensor(held.key)[window(held.start, held.size)]
            assert torch.equal(bits(held.tensor), bits(theirs)), f"{held.key} from {held.start}"
        assert {held.key for rank in self.loaded for held in rank} == saved.index.keys()

    def assert_same_end(self, other: "TrainedSegment") -> None:
        """Fail unless both segments saved the same state, bit for bit."""
        assert self.losses == other.losses
        assert self.saved.index.keys() == other.saved.index.keys()
        for key in self.saved.index:
            assert torch.equal(bits(self.saved.full_tensor(key)), bits(other.saved.full_tensor(key))), key
        assert self.saved.progress == other.saved.progress


def train_segment(recipe: Recipe, plan: Plan, *, steps: int, after: SavedState | None = None) -> TrainedSegment:
    """Train `steps` steps in forked ranks, from the start or from a saved state."""
    start = after.step if after else 0
    results = run_ranks(plan.mesh.world_size, _train, recipe, plan, after, range(start, start + steps))
    return _segment(results, start, steps)


def train_segment_here(recipe: Recipe, plan: Plan, *, steps: int, after: SavedState | None = None) -> TrainedSegment:
    """Train in this process, on its first device: a process cannot use the GPU if its parent already does."""
    start = after.step if after else 0
    return _segment([_train(recipe, plan, after, range(start, start + steps))], start, steps)


def chain_segments(results: Sequence[Sequence[Any]], steps: int) -> list[TrainedSegment]:
    """Return the segments that the ranks trained, each with the results of `chain_results`."""
    return [_segment(rows, number * steps, steps) for number, rows in enumerate(zip(*results, strict=True))]


def chain_results(recipe: Recipe, plans: Sequence[Plan], steps: int) -> list[Any]:
    """Train a segment under each plan in this rank, each from the state that the one before has saved."""
    found: list[Any] = []
    after: SavedState | None = None
    for number, plan in enumerate(plans):
        found.append(_train(recipe, plan, after, range(number * steps, (number + 1) * steps)))
        ends: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ends, found[-1][3])
        after = _saved_state((number + 1) * steps, ends)
    return found


def _segment(results: Sequence[Any], start: int, steps: int) -> TrainedSegment:
    losses, loaded, *states = zip(*results, strict=True)
    assert all(each == losses[0] for each in losses), "ranks differ in the loss"
    midway, end = (_saved_state(at, each) for at, each in zip((start + steps // 2, start + steps), states, strict=True))
    return TrainedSegment(losses[0], list(loaded), midway, end)


def _saved_state(step: int, results: Sequence[tuple[list[HeldShard], dict[str, Any]]]) -> SavedState:
    shares, progress = zip(*results, strict=True)
    assert all(each == progress[0] for each in progress), "ranks differ in their progress"
    return SavedState(step, shares, progress[0])


def _train(
    recipe: Recipe, plan: Plan, after: SavedState | None, steps: range
) -> tuple[list[float], list[HeldShard], Any, Any]:
    rank_info = read_rank_info(os.environ)
    if not dist.is_initialized():
        join_process_group(rank_info)
    ranks = build_mesh(plan.mesh, device_type=rank_info.device.type)
    networks = build_networks(recipe, plan, rank_info, ranks)
    clock, features = StepClock(rank_info.device), features_of(plan, recipe)
    stepper = build_stepper(networks, recipe.train, plan, ranks, clock, features=features)
    stepper.set_training(True)
    state = stepper.state(recipe.train)
    if after is not None:
        load(state, after)
    state.gather()
    loaded = [held(shard) for shard in state.shards()]
    losses, midway = [], None
    for step in steps:
        if step == steps.start + len(steps) // 2:
            midway = (share_of(state), state.progress())
        ranks.reseed(recipe.train.seed, step)
        stepper.step(batch_of(step, recipe, plan, ranks).to(rank_info.device))
        norm, refused = stepper.update(learning_rate(step, recipe.train))
        losses.append(stepper.numbers_later(norm, refused)()[0])
    return losses, loaded, midway, (share_of(state), state.progress())


def load(state: CheckpointState, source: SavedState) -> None:
    shards = state.shards_from(source.index)
    fill_shards(shards, source)
    refuse_unused_tensors(shards, source, gather=gather, allowed=MAY_BE_UNUSED)
    state.restore(source.progress)


def share_of(state: CheckpointState) -> list[HeldShard]:
    """Return the items that this rank would write, copied through the flat memory of its share."""
    state.gather()
    shards = state.shards()
    share = build_share(
        shards, assign_rows(shards, rank=dist.get_rank(), world_size=dist.get_world_size(), gather=gather)
    )
    memory = torch.zeros(share.num_bytes, dtype=torch.uint8)
    copy_to_memory(share, shards, memory)
    return [
        HeldShard(each.key, each.meta, each.start, each.size, to_bytes(item_view(memory, each))) for each in share.items
    ]


def held(shard: TensorShard) -> HeldShard:
    values = torch.empty(shard.tensor.shape, dtype=shard.tensor.dtype)
    copy_values(shard.tensor, values)
    return HeldShard(shard.key, meta_of(shard), shard.start, tuple(shard.tensor.shape), to_bytes(values))


def batch_of(step: int, recipe: Recipe, plan: Plan, ranks: RankMesh) -> StepBatch:
    """Return this rank's rows of a global batch that depends on the step only. Rows have very uneven valid tokens."""
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
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return torch.stack(rows).numpy()


def window(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + extent) for first, extent in zip(start, size, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits, so that NaN equals itself and -0 does not equal 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def to_bytes(tensor: torch.Tensor) -> bytes:
    return bits(tensor.detach().cpu()).numpy().tobytes()
