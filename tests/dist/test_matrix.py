"""The parity matrix: every axis, and combinations of axes, train as one process does (principle 2, docs/principles.md).

`make matrix` runs the full matrix. Here are all cases on up to four ranks, and three axes combined on eight: `make
test` runs the axes alone, the pairs of `tests.matrix.PAIRS` and that of three, `make chaos` the others.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.cases import quick_or_slow
from tests.matrix import (
    THREE_AXES,
    Case,
    cases,
    has_adapter,
    has_ring,
    is_quick,
    recipe_for,
    reference,
    run,
    write_documents,
)
from tests.parity import assert_same_trajectory
from tests.ranks import run_ranks
from trimaran.core import Mesh, Plan, Recipe
from trimaran.hardware import parse_cluster
from trimaran.models import ModelSpec, spec_of
from trimaran.nets import Decoder, initialise
from trimaran.nets.hf_weights import full_tensor
from trimaran.parallel import build_mesh
from trimaran.planner import check_plan
from trimaran.train.build import build_networks
from trimaran.train.process.rank_info import join_process_group, read_rank_info


def is_variant(case: Case) -> bool:
    """Return whether another case has the same mesh, and the same parameters on each rank."""
    return has_adapter(case) or case.plan.comm.regather or has_ring(case)


# `test_pipeline.py` trains under these two schedules, and evaluates and generates, too.
ELSEWHERE = ("pp2-interleaved-accumulate-4-dense-tied", "pp2-zero-bubble-accumulate-4-mixture-tied")
FEW_STEPS = {"steps": 5, "lr": 1e-2}  # after which the loss has fallen as after the ten of `make matrix`
EVERY = cases()
CHOSEN = [case for case in EVERY if case.plan.mesh.world_size <= 4 or case.plan.mesh == THREE_AXES]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    write_documents(folder / "uneven.jsonl")
    (folder / "runs").mkdir()
    return folder


def is_trained(case: Case) -> bool:
    """Return whether `make test` trains this case."""
    return is_quick(case) and str(case) not in ELSEWHERE


@pytest.mark.parametrize("case", quick_or_slow(CHOSEN, is_trained), ids=str)
def test_every_combination_of_axes_trains_as_one_process_does(workspace: Path, case: Case) -> None:
    expected = reference(case.model, workspace, **FEW_STEPS)
    assert_same_trajectory(run(case, workspace, **FEW_STEPS), expected)
    assert expected.losses[-1] < 0.9 * expected.losses[0], "the loss must fall, or the comparison proves nothing"


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


@pytest.mark.parametrize(
    "case",
    quick_or_slow(
        {case.plan.mesh: case for case in CHOSEN if not is_variant(case)}.values(),
        lambda case: is_quick(case) and (case.plan.mesh.world_size == 2 or case.plan.mesh == Mesh(dp_shard=2, pp=2)),
    ),
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
