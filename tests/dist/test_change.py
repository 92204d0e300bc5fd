"""A run changes its plan in its own processes: the state is handed over bit for bit, or the old plan is back."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from tests.changes import ChangedTraining, change_recipe, train_with_changes
from tests.parity import Trajectory, assert_same_trajectory, plan_for, train_trajectory, trajectory_of
from trimaran.autopilot import settings_of, undo_of
from trimaran.core import Plan
from trimaran.parallel import RECOMPUTED_ATTRIBUTE
from trimaran.parallel.axes import ddp, fsdp
from trimaran.train.features.live_change import apply_change, rebuild

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changes")


@cache
def unchanged(folder: Path, steps: int = STEPS) -> Trajectory:
    """Return the trajectory of the dense recipe on one rank."""
    recipe = change_recipe(steps=steps)
    return train_trajectory(recipe, plan_for(recipe, grad_accum=2), folder)


def assert_applied(trained: ChangedTraining, number: int) -> None:
    assert [each["status"] for each in trained.answers] == ["applied"] * number, trained.answers
    assert len(trained.hand_overs) == number
    for each in trained.hand_overs:
        each.assert_equal()


def check_networks() -> None:
    """Make a change in place fail unless the networks follow the new plan."""
    change_in_place, buckets, prefetched = rebuild.change_in_place, list[float](), dict[nn.Module, int]()
    fsdp.unit_sizes = lambda plan, block_parameters, num_blocks: [1] * num_blocks  # such small blocks would be one unit
    set_modules = FSDPModule.set_modules_to_forward_prefetch

    class RecordedDdp(DistributedDataParallel):
        def __init__(self, *args: Any, bucket_cap_mb: float, **options: Any) -> None:
            buckets.append(bucket_cap_mb)
            super().__init__(*args, bucket_cap_mb=bucket_cap_mb, **options)

    def recorded(self: FSDPModule, modules: list[FSDPModule]) -> None:
        assert isinstance(self, nn.Module)
        prefetched[self] = len(modules)
        set_modules(self, modules)

    def checked(context: Any, parts: Any, agree: Any) -> Any:
        before = parts.context.plan.comm.bucket_mb
        new, plan = change_in_place(context, parts, agree), context.plan
        (network,) = new.networks
        recomputed = [RECOMPUTED_ATTRIBUTE in getattr(each.forward, "__dict__", {}) for each in network.blocks]
        assert recomputed == [_is_recomputed(plan, number) for number in range(len(recomputed))]
        if plan.comm.bucket_mb != before:
            assert buckets.pop() == plan.comm.bucket_mb
        assert buckets == []
        ahead = prefetched.get(network.blocks[0], 0)
        assert ahead == (plan.comm.prefetch if plan.comm.prefetch > 1 else 0)
        return new

    ddp.DistributedDataParallel = RecordedDdp
    FSDPModule.set_modules_to_forward_prefetch = recorded  # type: ignore[method-assign]
    rebuild.change_in_place = checked


def _is_recomputed(plan: Plan, number: int) -> bool:
    return number % plan.recompute == 0 if isinstance(plan.recompute, int) else plan.recompute != "none"


def test_a_run_goes_through_all_kinds_of_plans_on_two_ranks(folder: Path) -> None:
    recipe = change_recipe(steps=26)
    changes = {
        1: {"plan.micro_batch": 2, "plan.recompute": "full", "plan.comm.bucket_mb": 1},
        4: {"plan.comm.bucket_mb": 25, "plan.recompute": 2},
        7: {"plan.sharding": "parameters", "plan.recompute": "none"},
        10: {"plan.comm.prefetch": 2, "plan.recompute": "selective"},
        13: {"plan.comm.prefetch": 1, "plan.recompute": "none"},
        16: {"plan.mesh.tp": 2},
        19: {"plan.mesh.pp": 2, "plan.mesh.tp": 1},
        22: {"plan.mesh": {"dp_shard": 2}, "plan.sharding": "optimizer"},
    }
    plan = plan_for(recipe, dp_replicate=2, grad_accum=2)
    trained = train_with_changes(recipe, plan, folder, changes, inject=check_networks)
    assert_applied(trained, len(changes))
    ways = ["in place"] * 2 + ["rebuilt"] + ["in place"] * 2 + ["rebuilt"] * 3
    assert [each["how"] for each in trained.answers] == ways
    assert all(each["pause_seconds"] > 0 for each in trained.answers)
    assert_same_trajectory(trajectory_of(trained.run), unchanged(folder, steps=26))
    plan = trained.run.read_plan()
    assert (plan.mesh.dp_shard, plan.sharding, plan.micro_batch, plan.grad_accum) == (2, "optimizer", 2, 4)
    assert plan.prediction is not None
    assert len(trained.run.earlier_plans()) == len(changes)
    for rank in trained.leftovers:
        assert len({*rank["groups"]}) == 1, "each plan has as many process groups, and those of earlier ones are gone"
        assert max(rank["threads"]) <= min(rank["threads"]) + 1


APPLIED_AND_TAKEN_BACK: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "replicas": (
        {"dp_replicate": 2},
        [
            {"plan.offload": "optimizer"},
            {"plan.offload": "activations"},
            {"plan.loss": "chunked"},
            {"plan.comm.overlap": False},
            {"checkpoint.every": 5},
            {"checkpoint.memory": 3},
            {"checkpoint.asynchronous": False},
            {"data.workers": 1},
            {"faults.expandable_segments": True},
        ],
    ),
    "shards": (
        {"dp_shard": 2},
        [{"plan.offload": "parameters"}, {"plan.sharding": "gradients"}, {"plan.comm.bucket_mb": 1}],
    ),
    "pipeline": (
        {"pp": 2},
        [
            {"plan.pipeline.stages": [1, 3]},
            {"plan.pipeline.schedule": "gpipe"},
            {"plan.pipeline.schedule": "zero-bubble", "plan.pipeline.stages": [1, 1, 1, 1]},
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", APPLIED_AND_TAKEN_BACK)
def test_what_the_autopilot_may_change_is_applied_and_taken_back(folder: Path, name: str) -> None:
    mesh, patches = APPLIED_AND_TAKEN_BACK[name]
    recipe = change_recipe(steps=6 * len(patches) + 2, layers=4, data={"seq_len": 16, "workers": 0})
    plan = plan_for(recipe, grad_accum=4, **mesh)
    before = settings_of(plan, recipe)
    changes: dict[int, Mapping[str, Any]] = {}
    for number, patch in enumerate(patches):
        undo = undo_of(patch, before)
        assert undo is not None
        changes |= {6 * number + 1: patch, 6 * number + 4: undo}
    reference = train_trajectory(recipe, plan_for(recipe, grad_accum=2), folder)
    trained = train_with_changes(recipe, plan, folder, changes, shares_memory=True)
    assert [each["status"] for each in trained.answers] == ["applied"] * len(changes), trained.answers
    assert settings_of(trained.run.read_plan(), trained.run.read_recipe()) == before
    assert_same_trajectory(trajectory_of(trained.run), reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "patch",
    [{"plan.precision": "bf16"}, {"plan.comm.compression": {"kind": "powersgd", "warmup_steps": 0}}],
    ids=["precision", "compression"],
)
def test_a_recipe_that_allows_other_results_may_change_precision_and_compression(
    folder: Path, patch: dict[str, Any]
) -> None:
    recipe = change_recipe(steps=STEPS, autopilot={"mode": "off", "may_change_course": True})
    plan = plan_for(recipe, dp_replicate=2, grad_accum=2)
    undo = undo_of(patch, settings_of(plan, recipe))
    assert undo is not None
    trained = train_with_changes(recipe, plan, folder, {4: patch, 7: undo})
    assert [each["status"] for each in trained.answers] == ["applied"] * 2, trained.answers
    losses, usual = trajectory_of(trained.run).losses, unchanged(folder).losses
    assert losses[:4] == pytest.approx(usual[:4])
    assert losses != pytest.approx(usual, rel=1e-5), "the results are others"
    assert losses == pytest.approx(usual, rel=0.02)


@pytest.mark.slow
def test_changes_back_and_forth_leave_nothing_behind(folder: Path) -> None:
    recipe = change_recipe(steps=22)
    there, back = {"plan.mesh": {"tp": 2}}, {"plan.mesh": {"dp_shard": 2}}
    plan = plan_for(recipe, dp_shard=2, grad_accum=2)
    changes = {1: there, 4: back, 7: there, 10: back, 13: there, 16: back}
    trained = train_with_changes(recipe, plan, folder, changes, shares_memory=True)
    assert_applied(trained, len(changes))
    for rank in trained.leftovers:  # torch's caches may keep the meshes of two earlier plans, but not of more
        assert rank["groups"][5] == rank["groups"][3]
        assert rank["descriptors"][5] <= rank["descriptors"][3] + 4, rank
        assert rank["threads"][5] <= rank["threads"][3], rank


FOUR_RANKS: dict[str, tuple[dict[str, int], list[Mapping[str, Any]], Mapping[str, Any]]] = {
    "dense": (
        {"dp_replicate": 2, "dp_shard": 2},
        [
            {"plan.mesh.tp": 2},
            {"plan.mesh": {"dp_shard": 2, "pp": 2}, "plan.sharding": "gradients"},
            {"plan.mesh": {"dp_shard": 2, "cp": 2}, "plan.sharding": "parameters"},
            {"plan.mesh": {"tp": 2, "pp": 2}, "plan.pipeline.schedule": "interleaved"},
            {"plan.mesh": {"dp_replicate": 4}},
        ],
        {},
    ),
    "mixture": (
        {"dp_shard": 4},
        [
            {"plan.mesh.ep": 2},
            {"plan.mesh": {"dp_shard": 2, "tp": 2, "ep": 2}},
            {"plan.mesh": {"dp_replicate": 4, "ep": 4}},
        ],
        {"preset": "tiny-moe"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", FOUR_RANKS)
def test_a_run_goes_through_products_of_axes_on_four_ranks(folder: Path, model: str) -> None:
    mesh, patches, section = FOUR_RANKS[model]
    recipe = change_recipe(steps=3 * len(patches) + 3, layers=4, model=section)
    reference = train_trajectory(recipe, plan_for(recipe, grad_accum=2), folder)
    changes = {3 * number + 1: patch for number, patch in enumerate(patches)}
    trained = train_with_changes(recipe, plan_for(recipe, grad_accum=2, **mesh), folder, changes)
    assert_applied(trained, len(changes))
    assert_same_trajectory(trajectory_of(trained.run), reference)


@pytest.mark.slow
def test_an_adapter_on_a_frozen_base_survives_changes(folder: Path) -> None:
    recipe = change_recipe(steps=12, model={"adapter": {"kind": "lora", "rank": 4}})
    changes = {1: {"plan.mesh": {"dp_shard": 2}}, 4: {"plan.recompute": "full"}, 7: {"plan.mesh": {"tp": 2}}}
    reference = train_trajectory(recipe, plan_for(recipe, grad_accum=2), folder)
    trained = train_with_changes(recipe, plan_for(recipe, dp_replicate=2, grad_accum=2), folder, changes)
    assert_applied(trained, len(changes))
    assert_same_trajectory(trajectory_of(trained.run), reference)


def break_build_on_rank_1_and_the_first_steps() -> None:
    """Break the first build on rank 1. On all ranks, the first step of each later change runs out of memory."""
    build, apply = rebuild.build_empty_networks, apply_change.PlanChanger.apply
    builders, num_built, to_break = (rebuild.rebuild_with_room, rebuild.change_in_place), [0], [False]

    def broken(*args: Any) -> Any:
        num_built[0] += 1
        networks = build(*args)
        if num_built[0] == 1 and dist.get_rank() == 1:
            raise MemoryError("no memory for the new networks")
        return networks

    def with_broken_step(build: Any) -> Any:
        def build_broken(*args: Any) -> Any:
            new = build(*args)
            if to_break[0]:  # else these are the parts of the old plan, which are built again
                handle = new.networks[-1].module.register_forward_hook(lambda *_: out_of_memory(handle))
            to_break[0] = False
            return new

        return build_broken

    def noted(self: Any, step: int) -> Any:
        to_break[0] = True
        return apply(self, step)

    rebuild.build_empty_networks = broken  # pyrefly: ignore[bad-assignment]
    apply_change.PlanChanger.apply = noted  # type: ignore[method-assign]
    rebuild.rebuild_with_room, rebuild.change_in_place = map(with_broken_step, builders)


def out_of_memory(handle: RemovableHandle) -> None:
    handle.remove()
    raise RuntimeError("CUDA out of memory: tried to allocate 2 TiB")


def test_a_change_that_is_refused_or_fails_is_undone_and_the_run_goes_on(folder: Path) -> None:
    recipe = change_recipe(steps=16)
    plan = plan_for(recipe, dp_replicate=2, grad_accum=2)
    changes = {
        1: {"plan.precision": "bf16"},
        2: {"plan.micro_batch": 8, "plan.grad_accum": 8},
        3: {"train.lr": 0.5},
        4: {"plan.mesh.tp": 4},
        5: {"plan.micro_batch": 4},  # as it is
        6: {"plan.sharding": "parameters"},
        9: {"plan.sharding": "parameters"},
        12: {"plan.micro_batch": 8},
    }
    inject = break_build_on_rank_1_and_the_first_steps
    trained = train_with_changes(recipe, plan, folder, changes, inject=inject)
    assert [each["id"] for each in trained.answers] == [*range(1, 9)]
    assert [each["status"] for each in trained.answers] == ["refused"] * 5 + ["failed"] * 3
    assert [each["error"]["code"] for each in trained.answers[:5]] == ["S040", "S041", "S040", "S043", "S040"]
    whys = [each["error"]["what"] for each in trained.answers[5:]]
    assert "rank 1: MemoryError: no memory" in whys[0]
    assert all("RuntimeError: CUDA out of memory" in why for why in whys[1:])
    assert_same_trajectory(trajectory_of(trained.run), unchanged(folder, steps=16))
    assert trained.run.read_plan() == plan
    assert trained.run.earlier_plans() == []


def have_no_room() -> None:
    """Give the device room for two states, then none, and the last time room, but memory runs out anyway.

    Only after a first change does torch own the memory of weights on a CPU: numpy has filled it at the start.
    """
    build, stage, answers = rebuild.build_empty_networks, rebuild.StagedState.__init__, [True, False, True]
    staged: list[list[torch.UntypedStorage]] = []
    rebuild.has_room = lambda context: answers.pop(0)

    def remembered(self: Any, shards: Any) -> None:
        storages = [each.tensor.untyped_storage() for each in shards if isinstance(each.tensor, torch.Tensor)]
        staged.append([each for each in storages if each.resizable()])
        stage(self, shards)

    def build_with_freed_state(*args: Any) -> Any:
        if len(staged) == 1 and not answers:
            answers.append(True)  # once
            if dist.get_rank() == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (planted)")
        elif staged:
            assert staged[-1], "weights and optimizer states are elsewhere"
            assert all(each.nbytes() == 0 for each in staged[-1]), "and the device has their memory back"
        return build(*args)

    rebuild.StagedState.__init__ = remembered  # type: ignore[method-assign]
    rebuild.build_empty_networks = build_with_freed_state  # pyrefly: ignore[bad-assignment]


def test_without_room_for_both_states_the_old_one_waits_in_host_memory(folder: Path) -> None:
    recipe = change_recipe(steps=STEPS, faults={"shard_check": 0.0})  # it lends memory to numpy, too
    plan = plan_for(recipe, dp_replicate=2, grad_accum=2)
    changes = {
        1: {"plan.sharding": "optimizer"},
        4: {"plan.sharding": "parameters"},
        7: {"plan.mesh": {"dp_replicate": 2}},
    }
    trained = train_with_changes(recipe, plan, folder, changes, inject=have_no_room)
    assert_applied(trained, len(changes))
    assert ["stage" in each["pause_parts"] for each in trained.answers] == [False, True, True]
    assert_same_trajectory(trajectory_of(trained.run), unchanged(folder))
    for rank in trained.leftovers:
        assert len({*rank["groups"]}) == 1, "the groups of the attempt that ran out of memory are gone"


def have_no_room_and_fail() -> None:
    """Give the device no room after a first change, break the next build, and then give host memory no room either."""
    build, room, num_built = rebuild.build_empty_networks, [True], [0]
    rebuild.has_room = lambda context: bool(room) and room.pop()

    def broken(*args: Any) -> Any:
        num_built[0] += 1
        networks = build(*args)
        if num_built[0] == 2 and dist.get_rank() == 1:
            raise MemoryError("no memory for the new networks")
        return networks

    rebuild.build_empty_networks = broken  # pyrefly: ignore[bad-assignment]
    free = [10**15, 0]
    rebuild.free_bytes = lambda: free.pop(0)  # pyrefly: ignore[bad-assignment]


@pytest.mark.slow
def test_a_change_that_fails_gives_the_old_state_its_memory_back(folder: Path) -> None:
    recipe = change_recipe(steps=STEPS, faults={"shard_check": 0.0})
    plan = plan_for(recipe, dp_replicate=2, grad_accum=2)
    changes = {2: {"plan.sharding": "optimizer"}, 5: {"plan.sharding": "parameters"}, 8: {"plan.mesh.tp": 2}}
    trained = train_with_changes(recipe, plan, folder, changes, inject=have_no_room_and_fail)
    applied, broken, refused = trained.answers
    assert (applied["status"], broken["status"], refused["status"]) == ("applied", "failed", "failed")
    assert "rank 1: MemoryError: no memory" in broken["error"]["what"]
    assert "S046: the device has no room for the states of both plans" in refused["error"]["what"]
    assert "stage" in broken["pause_parts"]
    assert "stage" not in refused["pause_parts"]
    assert_same_trajectory(trajectory_of(trained.run), unchanged(folder))
    assert trained.run.read_plan().sharding == "optimizer"
