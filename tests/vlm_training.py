"""A small vision-language model, handmade batches, and its training trace under any plan."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trimaran.core import AdapterSection, Plan, TrainSection
from trimaran.data import DataShare, StepBatch
from trimaran.models import PRESETS, VLM_PRESETS, ExpertSpec, VlmSpec, stage_ranges, stages_of_rank
from trimaran.nets import Network, attach_adapter, initialise, initialise_adapter, network_of
from trimaran.parallel import RankMesh, apply_plan, build_mesh, freeze_towers
from trimaran.train import StepClock, Stepper, build_stepper, join_process_group, read_rank_info

SEQ_LEN, GLOBAL_BATCH, STEPS, IGNORED = 32, 8, 3, -100
GRIDS = ((2, 2), (2, 4), (4, 2), (4, 4))
_TINY = VLM_PRESETS["tiny"]
SPEC = replace(
    _TINY,
    vision=replace(_TINY.vision, layers=2, hidden=16, heads=2, ffn=32, patch=2),
    projector=replace(_TINY.projector, hidden=24),
    language=replace(PRESETS["tiny"], layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48),
    sections=(2, 1, 1),
)
TIED = replace(SPEC, language=replace(SPEC.language, tied=True))
DEEP = replace(
    SPEC,
    vision=replace(SPEC.vision, ends=replace(SPEC.vision.ends, stem_bias=True, table=3)),
    projector=replace(SPEC.projector, deepstack=(0, 1)),
    language=replace(SPEC.language, layers=3, block=replace(SPEC.language.block, qk_norm=True)),
    sections=(1, 1, 1, 1),
)
MIXTURE = replace(
    DEEP,
    language=replace(
        DEEP.language,
        block=replace(DEEP.language.block, experts=ExpertSpec(num_experts=4, top_k=2, ffn=16, normalize_top_k=True)),
    ),
)
# A large eps: otherwise the first AdamW updates have the same size for any gradient, even for rounding noise.
TRAIN: dict[str, Any] = {"lr": 3e-3, "steps": STEPS, "global_batch": GLOBAL_BATCH, "optimizer": {"eps": 1e-3}}


@dataclass(frozen=True, slots=True)
class TrainingTrace:
    """What a rank recorded: losses, gradient norms, gradient norms per tower, and the full final weights."""

    losses: list[float]
    norms: list[float]
    towers: list[dict[str, float]]
    weights: dict[str, np.ndarray]


@cache
def row(step: int, number: int) -> dict[str, np.ndarray]:
    """Return one row: three documents, some with images. Half of the rows, and all rows of step 1, have no images."""
    rng = np.random.default_rng([step, number])
    tokens = rng.integers(0, 250, SEQ_LEN)
    documents = np.repeat([0, 1, 2], [10, 14, 8]).astype(np.int32)
    pixels, grids = 3 * SPEC.vision.patch**2, []
    for start in (2, 12, 25) if rng.random() < 0.5 and step != 1 else ():
        grid = GRIDS[rng.integers(len(GRIDS))]
        grids.append(grid)
        tokens[start : start + grid[0] * grid[1] // 4] = SPEC.image_token
    labels = np.where(rng.random(SEQ_LEN) < 0.6, rng.integers(0, 250, SEQ_LEN), IGNORED)
    patches = rng.integers(0, 256, (sum(rows * columns for rows, columns in grids), pixels), dtype=np.uint8)
    return {
        "tokens": tokens,
        "labels": labels,
        "documents": documents,
        "positions": rng.integers(0, 12, (3, SEQ_LEN)),
        "patches": patches,
        "grids": np.array(grids, dtype=np.int32).reshape(-1, 2),
    }


def batch_of(step: int, share: DataShare) -> StepBatch:
    """Return this rank's rows of a step."""
    micro = [[row(step, int(each) % GLOBAL_BATCH) for each in numbers] for numbers in share.indices(0)]
    arrays = {
        name: np.stack([np.stack([each[name] for each in rows]) for rows in micro])
        for name in ("tokens", "labels", "documents")
    }
    arrays["positions"] = np.stack([np.stack([each["positions"] for each in rows], axis=1) for rows in micro])
    offsets = {}
    for name in ("patches", "grids"):
        parts = [np.concatenate([each[name] for each in rows]) for rows in micro]
        arrays[name] = np.concatenate(parts)
        offsets[name] = tuple(np.cumsum([0, *map(len, parts)]).tolist())
    tensors = {name: torch.from_numpy(each) for name, each in arrays.items()}
    return StepBatch(step, tensors, int((arrays["labels"] != IGNORED).sum()), offsets=offsets)


def build_rank(
    spec: VlmSpec,
    plan: Plan,
    train: Mapping[str, Any] = TRAIN,
    freeze: tuple[str, ...] = (),
    adapter: AdapterSection | None = None,
) -> tuple[Sequence[Network], Stepper, RankMesh]:
    """Return this rank's stages, initialised, the stepper that trains them, and the mesh."""
    if not dist.is_initialized():
        join_process_group(read_rank_info(os.environ))
    section, ranks = TrainSection.model_validate(train), build_mesh(plan.mesh, device_type="cpu")
    ranges = stage_ranges(spec, plan, seq_len=SEQ_LEN)
    here = stages_of_rank(plan.pipeline.schedule, plan.mesh.pp, ranks.rank("pp"), len(ranges))
    with torch.device("meta"):
        networks = tuple(network_of(spec, ranges[stage]) for stage in here)
    for network in networks:
        freeze_towers(network, freeze)
        if adapter is not None:
            with torch.device("meta"):
                attach_adapter(network, adapter, network_of(spec))
        apply_plan(network, plan, ranks)
        network.module.to_empty(device="cpu")
        initialise(network.module, seed=5, spec=spec)
        initialise_adapter(network.module, seed=5)
    stepper = build_stepper(networks, section, plan, ranks, StepClock(torch.device("cpu")))
    stepper.set_training(True)
    return networks, stepper, ranks


def share_of_data(plan: Plan, ranks: RankMesh) -> DataShare:
    """Return which rows of a step this rank trains."""
    return DataShare(rank=ranks.data_rank, dp=plan.mesh.dp, micro_batch=plan.micro_batch, grad_accum=plan.grad_accum)


def train_rank(
    spec: VlmSpec,
    plan: Plan,
    train: Mapping[str, Any],
    freeze: tuple[str, ...],
    adapter: AdapterSection | None = None,
) -> TrainingTrace:
    """Train this rank's part for a few steps."""
    networks, stepper, ranks = build_rank(spec, plan, train, freeze, adapter)
    section, share = TrainSection.model_validate(train), share_of_data(plan, ranks)
    losses, norms, towers = [], [], []
    for step in range(STEPS):
        numbers = stepper.step(batch_of(step, share).to(torch.device("cpu")))
        norm, refused = stepper.update(section.lr)
        assert not refused
        losses.append(numbers[0].item())
        norms.append(norm.item())
        details = stepper.details()().get("towers", {})
        towers.append({tower: each["grad_norm"] for tower, each in details.items()})
    weights = {
        name: stepper.full_tensor(each).numpy().copy()
        for network in networks
        for name, each in network.module.named_parameters()
    }
    return TrainingTrace(losses, norms, towers, weights)


def train_all_ranks(
    spec: VlmSpec,
    plan: Plan,
    train: Mapping[str, Any] = TRAIN,
    freeze: tuple[str, ...] = (),
    adapter: AdapterSection | None = None,
) -> list[TrainingTrace]:
    """Return the training trace of every rank under the plan."""
    return run_ranks(plan.mesh.world_size, train_rank, spec, plan, train, freeze, adapter)


class Case(NamedTuple):
    """A model, what is frozen in it, and how it is trained."""

    spec: VlmSpec
    plan: Plan
    train: Mapping[str, Any] = TRAIN
    freeze: tuple[str, ...] = ()
    adapter: AdapterSection | None = None


def train_rank_in_turn(cases: Sequence[Case]) -> list[TrainingTrace]:
    return [train_rank(*each) for each in cases]


def train_in_turn(cases: Sequence[Case]) -> list[list[TrainingTrace]]:
    """Return the traces of every rank for each case. The ranks are forked once; all plans need as many."""
    (world_size,) = {each.plan.mesh.world_size for each in cases}
    by_rank = run_ranks(world_size, train_rank_in_turn, list(cases))
    return [list(traces) for traces in zip(*by_rank, strict=True)]


def assert_each_trains_as_one_process(cases: Mapping[str, Case]) -> None:
    """Train every case on the same ranks; fail with the names of those whose trace is not that of one process."""
    alone = [each._replace(plan=plan_of(grad_accum=1)) for each in cases.values()]
    distinct = [each for number, each in enumerate(alone) if each not in alone[:number]]
    expected = [traces[0] for traces in train_in_turn(distinct)]
    wrong = []
    for name, single, traces in zip(cases, alone, train_in_turn([*cases.values()]), strict=True):
        try:
            assert_traces_match(traces, expected[distinct.index(single)])
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n\n".join(wrong)


def plan_of(*, grad_accum: int = 2, **fields: Any) -> Plan:
    """Return a plan for the global batch of these tests."""
    plan = Plan.model_validate(fields | {"grad_accum": grad_accum})
    return plan.model_copy(update={"micro_batch": GLOBAL_BATCH // plan.mesh.dp // grad_accum})


def assert_traces_match(traces: list[TrainingTrace], single: TrainingTrace, tolerance: float = 1e-5) -> None:
    """Fail unless every rank's numbers match those of a single process, and the ranks hold all of its weights."""
    weights: dict[str, np.ndarray] = {}
    for trace in traces:
        np.testing.assert_allclose(trace.losses, single.losses, rtol=tolerance)
        np.testing.assert_allclose(trace.norms, single.norms, rtol=tolerance)
        for ours, theirs in zip(trace.towers, single.towers, strict=True):
            assert ours == {name: pytest.approx(norm, rel=tolerance, abs=1e-12) for name, norm in theirs.items()}
        weights |= trace.weights
        for name, ours in trace.weights.items():
            off = np.linalg.norm(ours - single.weights[name]) / max(np.linalg.norm(single.weights[name]), 1e-12)
            assert off <= tolerance, f"{name} is off by {off:.1e}"
    assert weights.keys() == single.weights.keys()
