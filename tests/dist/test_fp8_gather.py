"""Weights gathered in fp8 give the same step as weights that are cast after the gather, bit for bit."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.dist.test_fp8 import SPEC, TOKENS
from tests.ranks import run_ranks
from trimaran.core import Mesh, Plan
from trimaran.nets import decoder_network, initialise
from trimaran.parallel import Fp8Parameter, apply_plan, autocast, build_mesh, convert_linears, parameter_groups
from trimaran.train import join_process_group, read_rank_info


def two_steps(
    recipe: str, all_gather: bool, degrees: dict[str, int], device: str = "cpu"
) -> tuple[list[Tensor], int, int]:
    """Return loss and gradients of two steps with an update between, how many weights, and how many bytes of them."""
    join_process_group(read_rank_info(os.environ, on_cpu=device == "cpu"))
    tokens, mesh = TOKENS[:1].to(device), Mesh(**degrees)
    plan = Plan(precision="bf16", mesh=mesh, sharding="parameters", fp8={"recipe": recipe, "all_gather": all_gather})
    network = decoder_network(SPEC)
    initialise(network.module, seed=0, spec=SPEC)
    convert_linears(network, recipe)  # `apply_fp8` refuses a CPU
    network.module.to(device)
    ranks = build_mesh(plan.mesh, device_type=device)
    apply_plan(network, plan, ranks)
    found: list[Tensor] = []
    for _ in range(2):
        with torch.backends.mkldnn.flags(enabled=False), autocast(plan, torch.device(device)):
            logits, _ = network.forward({"tokens": tokens + ranks.data_rank})
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        found.append(loss.detach().cpu())
        for each in network.module.parameters():
            assert isinstance(each.grad, DTensor)
            found.append(each.grad.to_local().clone().cpu())
            with torch.no_grad():
                each.sub_(0.1 * each.grad)
            each.grad = None
    parameters = [each for group in parameter_groups(network.module) for each in group.fsdp_params]
    ours = [each for each in parameters if isinstance(each, Fp8Parameter)]
    gathered = [out for each in ours for out in each.all_gather_outputs]
    return found, len(ours), sum(out.numel() * out.element_size() for out in gathered)


@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("recipe", ["tensor", "block"])
def test_a_gather_in_fp8_changes_no_bit(recipe: str, degrees: dict[str, int]) -> None:
    world_size = 2 * degrees.get("dp_replicate", 1)
    expected = run_ranks(world_size, two_steps, recipe, False, degrees)
    for (ours, count, num_bytes), (theirs, none, _) in zip(
        run_ranks(world_size, two_steps, recipe, True, degrees), expected, strict=True
    ):
        assert (count, none) == (7, 0)
        weights = 4 * 256 * 256 + 3 * 256 * 512
        assert num_bytes == weights + (4 * weights // 128**2 if recipe == "block" else 0)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
