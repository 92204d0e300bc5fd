"""bf16 and 8-bit optimizer states train nearly as well as fp32, and the same under every plan."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.cases import quick_or_slow, slow
from tests.parity import TOLERANCE, plan_for, train_trajectory
from tests.ranks import run_ranks
from trimaran.core import Plan, Recipe, TrainSection
from trimaran.parallel import build_optimizer, gradient_norm

LOW_PRECISION = ["bf16", "8bit"]


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
    trajectory = train_trajectory(recipe, plan_for(recipe, grad_accum=1), folder)
    loss = sum(trajectory.losses[-50:]) / 50
    assert loss < 0.6 * trajectory.losses[0], "the model must learn for the comparison to mean anything"
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("states", LOW_PRECISION)
def test_low_precision_states_train_within_a_five_hundredth_of_fp32(
    states: str, folder: Path, fp32_loss: float
) -> None:
    assert last_loss(states, folder) == pytest.approx(fp32_loss, rel=0.002)


@pytest.mark.parametrize("states", quick_or_slow(LOW_PRECISION, lambda states: states == "8bit"))
def test_every_plan_rounds_the_same(states: str, folder: Path) -> None:
    """Losses and norms agree as in fp32. Weights agree to a thousandth: plans sum gradients in different orders, and
    where the last bit changes a rounding, that moment is off by a step of its format."""
    recipe = recipe_for(states, lr=3e-3, steps=3)
    reference = train_trajectory(recipe, plan_for(recipe, grad_accum=1), folder)
    for degrees in ({"dp_shard": 2},):
        trajectory = train_trajectory(recipe, plan_for(recipe, grad_accum=2, **degrees), folder)
        assert trajectory.losses == pytest.approx(reference.losses, rel=TOLERANCE)
        assert trajectory.norms == pytest.approx(reference.norms, rel=TOLERANCE)
        for name, theirs in reference.weights.items():
            assert (trajectory.weights[name] - theirs).norm() <= 1e-3 * theirs.norm(), name


@pytest.mark.parametrize("states", [slow("fp32"), slow("bf16"), "8bit"])
def test_states_on_the_host_give_bitwise_equal_weights(states: str, folder: Path) -> None:
    recipe = recipe_for(states, steps=3)
    plan = plan_for(recipe, grad_accum=1, dp_shard=2)
    plans = [plan.model_copy(update={"offload": each}) for each in ("none", "optimizer")]
    on_device, on_host = (train_trajectory(recipe, each, folder) for each in plans)
    assert on_device.losses == on_host.losses
    assert all(torch.equal(one, on_host.weights[name]) for name, one in on_device.weights.items())


class ManyMeshes(nn.Module):
    """Parameters sharded over one mesh, over another, over both, unevenly, and not at all."""

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"rows": (64, 512), "columns": (32, 512), "both": (48, 1024), "uneven": (33, 256), "vector": (96,)}
        shapes |= {"unsharded": (24, 300), "plain": (5,)}
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        if sharded:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            tensors["rows"] = distribute_tensor(tensors["rows"], mesh["dp"], [Shard(0)])
            tensors["columns"] = distribute_tensor(tensors["columns"], mesh["tp"], [Shard(1)])
            tensors["both"] = distribute_tensor(tensors["both"], mesh, [Shard(0), Shard(1)])
            tensors["uneven"] = distribute_tensor(tensors["uneven"], mesh["dp"], [Shard(0)])
            tensors["vector"] = distribute_tensor(tensors["vector"], mesh["tp"], [Shard(0)])
        for name, value in tensors.items():
            self.register_parameter(name, nn.Parameter(value))

    def fill_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            gradient = torch.randn(parameter.shape, generator=generator) + 0.2
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient


def weights_after_training(sharded: bool, states: str, offload: Any) -> dict[str, np.ndarray]:
    """Return the unsharded weights after five steps."""
    if sharded:
        dist.init_process_group("gloo")
    module = ManyMeshes(sharded)
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


@pytest.mark.parametrize(
    ("states", "offload"),
    [("fp32", "optimizer"), ("8bit", "none"), slow(("8bit", "optimizer")), slow(("bf16", "none"))],
)
def test_parameters_on_different_meshes_are_updated_like_unsharded_ones(states: str, offload: str) -> None:
    reference = weights_after_training(False, states, "none")
    for rank in run_ranks(4, weights_after_training, True, states, offload):
        assert rank.keys() == reference.keys()
        for name, theirs in reference.items():
            torch.testing.assert_close(torch.tensor(rank[name]), torch.tensor(theirs), rtol=0, atol=0, msg=name)


def train_replica(states: str) -> dict[str, Any]:
    """Return this rank's weights after steps with different torch RNG states on each rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    module = ManyMeshes(sharded=False)
    optimizer = build_optimizer([module], TrainSection.model_validate({"optimizer": {"states": states}}), Plan())
    for step in range(5):
        torch.randn(dist.get_rank() + 1)
        module.fill_gradients(step)
        optimizer.step()
    return {name: each.detach().numpy() for name, each in module.named_parameters()}


@pytest.mark.parametrize("states", LOW_PRECISION)
def test_replicas_stay_bitwise_equal(states: str) -> None:
    first, second = run_ranks(2, train_replica, states)
    assert all((first[name] == second[name]).all() for name in first)


def norms_of_bf16() -> tuple[float, float, float]:
    """Return the norm of bf16 gradients, of bf16 and fp32 ones together, and of fp32 ones of bf16 weights."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    narrow = [nn.Parameter(torch.zeros(300, 400, dtype=torch.bfloat16)) for _ in range(3)]
    wide = nn.Parameter(torch.zeros(1000))
    for each in narrow:
        each.grad = torch.randn(each.shape, generator=generator).bfloat16()
    wide.grad = torch.randn(1000, generator=generator)
    norms = [gradient_norm(narrow), gradient_norm([*narrow, wide])]
    for each in narrow:
        each.grad_dtype = None
        each.grad = torch.ones(each.shape)
    return float(norms[0]), float(norms[1]), float(gradient_norm(narrow))


def test_the_norm_of_bf16_gradients_is_summed_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    narrow = torch.stack([torch.randn((300, 400), generator=generator).bfloat16() for _ in range(3)]).double()
    wide = torch.randn(1000, generator=generator).double()
    of_narrow, of_both, of_sums = run_ranks(1, norms_of_bf16)[0]
    assert of_narrow == pytest.approx(float(narrow.norm()), rel=1e-5)
    assert of_both == pytest.approx(float((narrow.square().sum() + wide.square().sum()).sqrt()), rel=1e-5)
    assert of_sums == 600.0
