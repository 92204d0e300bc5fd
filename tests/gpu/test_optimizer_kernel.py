"""AdamW's GPU kernel equals the CPU code in every format, and does nothing when a step is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_train_optimizer import FORMATS, ManyShapes, section
from tests.unit.test_train_split_bf16 import split_matrices
from trimaran.core import Plan
from trimaran.optim import build_optimizer
from trimaran.optim.block_quantization import codebook, lower_bounds, num_blocks, quantize
from trimaran.optim.moments import FORMATS as MOMENTS
from trimaran.optim.moments import AdamWConstants, StateChunk, step_constants, update_chunk
from trimaran.optim.split_bf16 import join_fp32
from trimaran.optim.stochastic_rounding import hash_text

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
CONSTANTS = AdamWConstants(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


class TrainedModule:
    """Parameters of many shapes on a device, as fp32 or split weights, and their optimizer."""

    def __init__(self, device: str, states: str, *, halves: bool) -> None:
        self.module = ManyShapes().to(device)
        self.lower_halves = split_matrices(self.module) if halves else {}
        # With offload on the CPU, so that our code updates fp32 states there too: torch's AdamW has no factor.
        plan = Plan(offload="optimizer" if device == "cpu" and not halves else "none")
        self.optimizer: Any = build_optimizer([self.module], section(states), plan, lower_halves=self.lower_halves)

    def step(self, number: int, *, refused: bool = False) -> None:
        generator = torch.Generator().manual_seed(number)
        for each in self.module.parameters():
            gradient = torch.randn(each.shape, generator=generator) + 0.3
            each.grad = (gradient * torch.nan if refused else gradient).to(each.device, each.dtype)
        device = next(self.module.parameters()).device
        self.optimizer.found_inf = torch.tensor(float(refused), device=device)
        self.optimizer.factor = torch.tensor(0.37, device=device)
        self.optimizer.step()

    def weights(self) -> Tensor:
        halves = self.lower_halves
        weights = [join_fp32(each, halves[each]) if each in halves else each for each in self.module.parameters()]
        return torch.cat([each.detach().cpu().flatten() for each in weights])


# Relative to how far the weights moved. Different noise would give 4e-3 in bf16; a last bit may change a rounding.
@pytest.mark.parametrize(("states", "bound"), [("fp32", 3e-6), ("bf16", 5e-4), ("8bit", 5e-4)])
@pytest.mark.parametrize("halves", [False, True], ids=["fp32", "split"])
def test_a_gpu_updates_weights_like_a_cpu(states: str, bound: float, halves: bool) -> None:
    on_gpu, on_cpu = (TrainedModule(device, states, halves=halves) for device in ("cuda", "cpu"))
    first = on_cpu.weights()
    for number in range(10):
        for each in (on_gpu, on_cpu):
            each.step(number)
    weights, reference = on_gpu.weights(), on_cpu.weights()
    assert (weights - reference).norm() <= bound * (reference - first).norm()


@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("halves", [False, True], ids=["fp32", "split"])
def test_a_refused_step_changes_no_bit_and_does_not_count(states: str, halves: bool) -> None:
    tested, reference = (TrainedModule("cuda", states, halves=halves) for _ in range(2))
    for number in range(3):
        tested.step(number, refused=True)  # also as the very first step
        for each in (tested, reference):
            each.step(number)
    assert torch.equal(tested.weights(), reference.weights())
    for one, other in zip(tested.optimizer.state.values(), reference.optimizer.state.values(), strict=True):
        assert float(one["step"]) == 3.0
        assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("width", [256, 300, 7])
def test_codes_equal_those_of_the_cpu(width: int) -> None:
    """With both betas 0, the moments are the gradient and its square. They include all values next to a bound."""
    near = [
        (bounds.view(torch.int32) + bits).view(torch.float32)
        for bounds in (lower_bounds(CPU, signed=True)[1:], lower_bounds(CPU, signed=False)[1:].sqrt())
        for bits in range(-2, 3)
    ]
    values = torch.cat([*near, *(-each for each in near), torch.randn(4000) * 10 ** (-8 * torch.rand(4000))])
    values = values[: len(values) // (width - 1) * (width - 1)].view(-1, width - 1)
    gradient = torch.cat([torch.ones(len(values), 1), values], dim=1)  # so that the values are relative to 1
    states = {
        key: torch.zeros(shape, dtype=dtype, device="cuda")
        for key, (shape, dtype) in MOMENTS["8bit"].layout(tuple(gradient.shape)).items()
    }
    constants = AdamWConstants(lr=1e-2, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.1)
    update_chunk_on_gpu(chunk_of(torch.zeros_like(gradient).cuda(), gradient.cuda(), states, constants), states, None)
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        expected = quantize(gradient if signed else gradient.square(), codebook(CPU, signed=signed), lowest=not signed)
        assert states[f"{key}_scale"].shape[-1] == num_blocks(width)
        assert torch.equal(states[f"{key}_scale"].cpu(), expected[1])
        assert torch.equal(states[key].cpu(), expected[0])


def test_rows_with_separate_index_runs_have_the_noise_of_the_cpu() -> None:
    """A matrix whose columns are sharded has one index run per row."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(70, 3000, generator=generator), torch.randn(70, 3000, generator=generator)
    starts = torch.arange(70, dtype=torch.int32) * 9000 + 6000
    moments = {}
    for device in ("cuda", "cpu"):
        states = {key: torch.zeros(70, 3000, dtype=torch.bfloat16, device=device) for key in ("exp_avg", "exp_avg_sq")}
        chunk = chunk_of(
            weight.to(device), gradient.to(device), states, CONSTANTS, index_runs=(starts.to(device), 3000)
        )
        if device == "cuda":
            update_chunk_on_gpu(chunk, states, None)
        else:
            update_chunk(chunk, states, MOMENTS["bf16"])
        moments[device] = torch.stack([*states.values()]).cpu()
    assert (moments["cuda"] != moments["cpu"]).float().mean() < 1e-3


def test_a_parameter_with_more_than_two_to_the_31_values_is_updated() -> None:
    """The last row is updated like the first one, which has the same values."""
    count = 2**31 + 2**12
    module = nn.ParameterDict({"wide": nn.Parameter(torch.ones(count // 2**12, 2**12, device="cuda"))})
    optimizer = build_optimizer([module], section("8bit"), Plan())
    module["wide"].grad = torch.ones_like(module["wide"])
    optimizer.step()
    first, last = module["wide"][0], module["wide"][-1]
    assert torch.equal(first, last)
    assert not torch.equal(last, torch.ones_like(last))


def chunk_of(
    weight: Tensor, gradient: Tensor, states: dict[str, Tensor], constants: AdamWConstants, **other: Any
) -> StateChunk:
    steps = torch.ones(1, device=weight.device)
    hashes = torch.tensor([hash_text("0/weight")], dtype=torch.int32, device=weight.device)
    return StateChunk(
        weight=weight,
        low=None,
        gradient=gradient,
        states=states,
        factor=None,
        step=steps[0],
        step_constants=step_constants(steps, hashes, constants)[0],
        constants=constants,
        parameter=weight,
        index_runs=other.get("index_runs"),
    )


def update_chunk_on_gpu(chunk: StateChunk, states: dict[str, Tensor], refused: Tensor | None) -> None:
    from trimaran.optim.kernels import adamw  # noqa: PLC0415  needs Triton

    adamw.update_chunk_on_gpu(chunk, states, refused)
