"""States in fewer bits train nearly the same model, and under every plan the same one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.cases import quick_or_slow
from tests.parity import TOLERANCE, plan_for, sail
from tests.ranks import run_ranks
from trimaran.core import Plan, Recipe, TrainSection
from trimaran.parallel import gradient_norm
from trimaran.optim import build_optimizer

LEAN = ["bf16", "8bit"]


def recipe_for(states: str, **train: object) -> Recipe:
    section = {"steps": 10, "global_batch": 8, "lr": 1e-3, "seed": 3, "sample": {"tokens": 0}}
    return Recipe.model_validate(
        {
            "model": {"preset": "tiny", "shape": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128}},
            "data": {"seq_len": 64},
            "train": section | {"optimizer": {"states": states}, "evaluate": {"batches": 0}} | train,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("optimizer") / "runs"
    runs.mkdir()
    return runs


@pytest.fixture(scope="module")
def fp32_loss(folder: Path) -> float:
    return last_loss("fp32", folder)


def last_loss(states: str, folder: Path) -> float:
    """Return the mean loss of the last fifty of two hundred steps on the standard library's text."""
    recipe = recipe_for(states, steps=200)
    course = sail(recipe, plan_for(recipe, grad_accum=1), folder)
    loss = sum(course.losses[-50:]) / 50
    assert loss < 0.6 * course.losses[0], "a model that learns nothing proves nothing"
    return loss


@pytest.mark.chaos
@pytest.mark.parametrize("states", LEAN)
def test_states_in_fewer_bits_train_as_well_within_a_five_hundredth(
    states: str, folder: Path, fp32_loss: float
) -> None:
    assert last_loss(states, folder) == pytest.approx(fp32_loss, rel=0.002)


@pytest.mark.parametrize("states", quick_or_slow(LEAN, lambda states: states == "8bit"))
def test_every_plan_rounds_alike(states: str, folder: Path) -> None:
    """Loss and norm agree as they do in fp32. Weights do to a thousandth: plans sum gradients in different orders, and
    where the last bit of one tips a rounding, that value's moment is off by a step of its format."""
    recipe = recipe_for(states, lr=3e-3)
    reference = sail(recipe, plan_for(recipe, grad_accum=1), folder)
    for degrees in ({"dp_replicate": 2}, {"dp_shard": 2}):
        course = sail(recipe, plan_for(recipe, grad_accum=2, **degrees), folder)
        assert course.losses == pytest.approx(reference.losses, rel=TOLERANCE)
        assert course.norms == pytest.approx(reference.norms, rel=TOLERANCE)
        for name, theirs in reference.weights.items():
            assert (course.weights[name] - theirs).norm() <= 1e-3 * theirs.norm(), name


@pytest.mark.parametrize("states", ["fp32", *LEAN])
def test_states_on_the_host_train_the_same_bits(states: str, folder: Path) -> None:
    recipe = recipe_for(states, steps=5)
    plan = plan_for(recipe, grad_accum=1, dp_shard=2)
    here, there = (sail(recipe, plan.model_copy(update={"offload": each}), folder) for each in ("none", "optimizer"))
    assert here.losses == there.losses
    assert all(torch.equal(one, there.weights[name]) for name, one in here.weights.items())


class Mixture(nn.Module):
    """Parameters split over one mesh, over another, over both, unevenly, and not at all."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"rows": (64, 512), "columns": (32, 512), "both": (48, 1024), "uneven": (33, 256), "vector": (96,)}
        shapes |= {"whole": (24, 300), "plain": (5,)}
        whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        if split:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            whole["rows"] = distribute_tensor(whole["rows"], mesh["dp"], [Shard(0)])
            whole["columns"] = distribute_tensor(whole["columns"], mesh["tp"], [Shard(1)])
            whole["both"] = distribute_tensor(whole["both"], mesh, [Shard(0), Shard(1)])
            whole["uneven"] = distribute_tensor(whole["uneven"], mesh["dp"], [Shard(0)])
            whole["vector"] = distribute_tensor(whole["vector"], mesh["tp"], [Shard(0)])
        for name, value in whole.items():
            self.register_parameter(name, nn.Parameter(value))

    def fill_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            gradient = torch.randn(parameter.shape, generator=generator) + 0.2
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient


def moved(split: bool, states: str, offload: Any) -> dict[str, torch.Tensor]:
    """Return the whole weights of a mixture after five steps."""
    if split:
        dist.init_process_group("gloo")
    module = Mixture(split)
    train = TrainSection.model_validate({"lr": 1e-2, "optimizer": {"states": states}})
    optimizer = build_optimizer([module], train, Plan(offload=offload))
    for step in range(5):
        module.fill_gradients(step)
        optimizer.step()
    with torch.no_grad():
        return {
            name: (each.full_tensor() if isinstance(each, DTensor) else each).numpy()
            for name, each in module.named_parameters()
        }


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("states", ["fp32", *LEAN])
def test_parameters_on_different_meshes_move_as_whole_ones_do(states: str, offload: str) -> None:
    reference = moved(False, states, "none")
    for rank in run_ranks(4, moved, True, states, offload):
        assert rank.keys() == reference.keys()
        for name, theirs in reference.items():
            torch.testing.assert_close(torch.tensor(rank[name]), torch.tensor(theirs), rtol=0, atol=0, msg=name)


def replica(states: str) -> dict[str, Any]:
    """Return this rank's weights after steps in which the ranks' own random states have gone different ways."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    module = Mixture(split=False)
    optimizer = build_optimizer([module], TrainSection.model_validate({"optimizer": {"states": states}}), Plan())
    for step in range(5):
        torch.randn(dist.get_rank() + 1)
        module.fill_gradients(step)
        optimizer.step()
    return {name: each.detach().numpy() for name, each in module.named_parameters()}


@pytest.mark.parametrize("states", LEAN)
def test_replicas_stay_the_same_bit_for_bit(states: str) -> None:
    first, second = run_ranks(2, replica, states)
    assert all((first[name] == second[name]).all() for name in first)


def norms_of_halves() -> tuple[float, float, float]:
    """Return the norm of bf16 gradients, of bf16 and fp32 ones together, and of those that were summed apart."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    narrow = [nn.Parameter(torch.zeros(300, 400, dtype=torch.bfloat16)) for _ in range(3)]
    wide = nn.Parameter(torch.zeros(1000))
    for each in narrow:
        each.grad = torch.randn(each.shape, generator=generator).bfloat16()
    wide.grad = torch.randn(1000, generator=generator)
    norms = [gradient_norm(narrow), gradient_norm([*narrow, wide])]
    for each in narrow:
        each.main_grad = torch.ones(each.shape)  # pyrefly: ignore[missing-attribute]
    return float(norms[0]), float(norms[1]), float(gradient_norm(narrow))


def test_the_norm_of_16_bit_gradients_is_summed_in_32() -> None:
    generator = torch.Generator().manual_seed(0)
    narrow = torch.stack([torch.randn((300, 400), generator=generator).bfloat16() for _ in range(3)]).double()
    wide = torch.randn(1000, generator=generator).double()
    of_narrow, of_both, of_sums = run_ranks(1, norms_of_halves)[0]
    assert of_narrow == pytest.approx(float(narrow.norm()), rel=1e-5)
    assert of_both == pytest.approx(float((narrow.square().sum() + wide.square().sum()).sqrt()), rel=1e-5)
    assert of_sums == 600.0
