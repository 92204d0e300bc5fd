"""The parity matrix: every axis, and every pair of axes, trains as one process does (principle 2, docs/principles.md).

`make test` trains every axis with each of its settings, and every pair of axes, in two steps on handmade batches, and
some axes with the real worker. `make matrix` trains all combinations with the worker, on up to eight ranks.
"""

import os
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import plan_training
from tests.cases import quick_or_slow
from tests.matrix import Case, cases, is_quick, recipe_for, reference, run, write_documents
from tests.parity import assert_same_trajectory
from tests.ranks import run_ranks
from trimaran.core import AXES, Mesh, Plan, Recipe
from trimaran.machine import parse_cluster
from trimaran.models import ModelSpec, spec_of
from trimaran.nets import Decoder, full_tensor, initialise
from trimaran.parallel import build_mesh
from trimaran.planner import check_plan
from trimaran.train import build_networks, join_process_group, read_rank_info

EVERY = cases()
QUICK = [case for case in EVERY if is_quick(case)]
# Sharing the data, checkpoints, metrics and the saved model, which the worker adds to the steps, under each axis.
WORKER = (Mesh(dp_replicate=2), Mesh(dp_shard=2), Mesh(tp=2), Mesh(cp=2))
FEW_STEPS = {"steps": 3, "lr": 2e-2}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    write_documents(folder / "uneven.jsonl")
    (folder / "runs").mkdir()
    return folder


def with_handmade_batches(case: Case) -> tuple[Recipe, Plan]:
    """Return the case for `tests.plan_training`, whose global batch is smaller."""
    model = recipe_for(case.model, Path("unread")).model_dump(exclude_unset=True)["model"]
    has_two_stages = case.plan.pipeline.schedule in ("interleaved", "zero-bubble")
    shape = model["shape"] | {"layers": case.plan.mesh.pp * (2 if has_two_stages or case.plan.recompute == 2 else 1)}
    micro_batch = plan_training.GLOBAL_BATCH // (case.plan.mesh.dp * case.plan.grad_accum)
    recipe = plan_training.recipe_of(model | {"shape": shape})
    return recipe, case.plan.model_copy(update={"micro_batch": micro_batch})


def test_the_matrix_has_every_pair_of_axes() -> None:
    def axes(case: Case) -> set[str]:
        return {axis for axis in AXES if getattr(case.plan.mesh, axis) > 1}

    pairs = {pair for case in QUICK for pair in combinations(sorted(axes(case)), 2)}
    assert pairs == set(combinations(sorted(AXES), 2))


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_axis_and_every_pair_of_axes_trains_as_one_process_does(world_size: int) -> None:
    chosen = [case for case in QUICK if case.plan.mesh.world_size == world_size]
    plan_training.assert_each_trains_as_one_process([with_handmade_batches(case) for case in chosen])


BY_WORKER = {case.plan.mesh: case for case in reversed(QUICK) if case.plan.mesh in WORKER}


@pytest.mark.parametrize("case", BY_WORKER.values(), ids=str)
def test_a_run_under_an_axis_trains_as_one_process_does(workspace: Path, case: Case) -> None:
    expected = reference(case.model, workspace, **FEW_STEPS)
    assert_same_trajectory(run(case, workspace, **FEW_STEPS), expected)
    assert expected.losses[-1] < 0.95 * expected.losses[0], "the loss must fall, or the comparison proves nothing"


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_case_of_the_matrix_is_legal_for_the_planner(workspace: Path, case: Case) -> None:
    recipe = recipe_for(case.model, workspace / "uneven.jsonl")
    check_plan(case.plan, recipe, spec_of(recipe.model), parse_cluster(f"{case.plan.mesh.world_size}xcpu"))


def state_under(recipe: Recipe, plan: Plan) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the names of this rank's parameters, and its state dict with every value whole."""
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    networks = build_networks(recipe, plan, rank_info, build_mesh(plan.mesh, device_type="cpu"))
    names = [name for network in networks for name, _ in network.module.named_parameters()]
    state = {
        name: full_tensor(each).numpy() for network in networks for name, each in network.module.state_dict().items()
    }
    dist.barrier()  # no rank may exit while another still gathers
    return names, state


OF_STATES = {case.plan.mesh: case for case in QUICK if case.plan.comm.context != "ring"}


@pytest.mark.parametrize(
    "case",
    quick_or_slow(OF_STATES.values(), lambda case: case.plan.mesh == Mesh(dp_shard=2, pp=2)),
    ids=lambda case: str(case.plan.mesh),
)
def test_a_state_dict_taken_under_any_plan_loads_into_one_process(workspace: Path, case: Case) -> None:
    recipe = recipe_for(case.model, workspace / "uneven.jsonl")
    spec = spec_of(recipe.model)
    assert isinstance(spec, ModelSpec)
    plain, first = Decoder(spec), Decoder(spec)
    initialise(first, seed=recipe.train.seed, spec=spec)
    results = run_ranks(case.plan.mesh.world_size, state_under, recipe, case.plan)
    assert {name for names, _ in results for name in names} == dict(plain.named_parameters()).keys()
    state = {name: torch.from_numpy(value) for _, values in results for name, value in values.items()}
    plain.load_state_dict(state, strict=True)
    for name, each in first.named_parameters():
        assert torch.equal(plain.get_parameter(name), each), f"{name} does not start as it does in one process"
