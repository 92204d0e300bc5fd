"""AdamW's kernel: that it does what the CPU does, in every format, and nothing when a step is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.test_train_optimizer import FORMATS, Oddities, section
from tests.unit.test_train_optimizer_halves import halved
from trimaran.core import Plan
from trimaran.optim import build_optimizer
from trimaran.optim.block_quantization import codebook, edges, num_blocks, quantised
from trimaran.optim.moments import FORMATS as MOMENTS
from trimaran.optim.moments import Constants, StateChunk, move, words
from trimaran.optim.split_bf16 import join
from trimaran.optim.stochastic_rounding import salt

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
CONSTANTS = Constants(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


class Run:
    """Parameters of every shape on a device, whole or in halves, and their optimizer."""

    def __init__(self, device: str, states: str, *, halves: bool) -> None:
        self.module = Oddities().to(device)
        self.lows = halved(self.module) if halves else {}
        # On the host of the CPU, so that it is our way that moves fp32 states there, with a factor.
        plan = Plan(offload="optimizer" if device == "cpu" and not halves else "none")
        self.optimizer: Any = build_optimizer([self.module], section(states), plan, lows=self.lows)

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
        whole = [join(each, self.lows[each]) if each in self.lows else each for each in self.module.parameters()]
        return torch.cat([each.detach().cpu().flatten() for each in whole])


# Of the way that the weights went. Other noise would make it 4e-3 in bf16; a last bit may tip a rounding now and then.
@pytest.mark.parametrize(("states", "bound"), [("fp32", 3e-6), ("bf16", 5e-4), ("8bit", 5e-4)])
@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_a_gpu_moves_weights_as_a_cpu_does(states: str, bound: float, halves: bool) -> None:
    runs = [Run(device, states, halves=halves) for device in ("cuda", "cpu")]
    first = runs[1].weights()
    for number in range(10):
        for run in runs:
            run.step(number)
    course, reference = (run.weights() for run in runs)
    assert (course - reference).norm() <= bound * (reference - first).norm()


@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_a_refused_step_changes_no_bit_and_does_not_count(states: str, halves: bool) -> None:
    run, undisturbed = (Run("cuda", states, halves=halves) for _ in range(2))
    for number in range(3):
        run.step(number, refused=True)  # also as the very first
        for each in (run, undisturbed):
            each.step(number)
    assert torch.equal(run.weights(), undisturbed.weights())
    for one, other in zip(run.optimizer.state.values(), undisturbed.optimizer.state.values(), strict=True):
        assert float(one["step"]) == 3.0
        assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("width", [256, 300, 7])
def test_codes_are_the_ones_that_the_cpu_finds(width: int) -> None:
    """Without a memory (both betas are 0) the moments are the gradient and its square. All that are near an edge are
    among them."""
    near = [
        (at.view(torch.int32) + bits).view(torch.float32)
        for at in (edges(CPU, signed=True)[1:], edges(CPU, signed=False)[1:].sqrt())
        for bits in range(-2, 3)
    ]
    values = torch.cat([*near, *(-each for each in near), torch.randn(4000) * 10 ** (-8 * torch.rand(4000))])
    values = values[: len(values) // (width - 1) * (width - 1)].view(-1, width - 1)
    gradient = torch.cat([torch.ones(len(values), 1), values], dim=1)  # so that the values are relative to 1
    states = {
        key: torch.zeros(shape, dtype=dtype, device="cuda")
        for key, (shape, dtype) in MOMENTS["8bit"].layout(tuple(gradient.shape)).items()
    }
    constants = Constants(lr=1e-2, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.1)
    move_on_gpu(piece_of(torch.zeros_like(gradient).cuda(), gradient.cuda(), states, constants), states, None)
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        expected = quantised(gradient if signed else gradient.square(), codebook(CPU, signed=signed), lowest=not signed)
        assert states[f"{key}_scale"].shape[-1] == num_blocks(width)
        assert torch.equal(states[f"{key}_scale"].cpu(), expected[1])
        assert torch.equal(states[key].cpu(), expected[0])


def test_rows_that_are_numbered_apart_have_their_own_noise() -> None:
    """As those of a matrix are whose columns are split over ranks. The noise is the CPU's, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(70, 3000, generator=generator), torch.randn(70, 3000, generator=generator)
    starts = torch.arange(70, dtype=torch.int32) * 9000 + 6000
    moments = {}
    for device in ("cuda", "cpu"):
        states = {key: torch.zeros(70, 3000, dtype=torch.bfloat16, device=device) for key in ("exp_avg", "exp_avg_sq")}
        piece = piece_of(weight.to(device), gradient.to(device), states, CONSTANTS, runs=(starts.to(device), 3000))
        if device == "cuda":
            move_on_gpu(piece, states, None)
        else:
            move(piece, states, MOMENTS["bf16"])
        moments[device] = torch.stack([*states.values()]).cpu()
    assert (moments["cuda"] != moments["cpu"]).float().mean() < 1e-3


def test_more_values_than_31_bits_can_count() -> None:
    """Each value of the last rows moves as the same value of the first ones does."""
    count = 2**31 + 2**12
    module = nn.ParameterDict({"wide": nn.Parameter(torch.ones(count // 2**12, 2**12, device="cuda"))})
    optimizer = build_optimizer([module], section("8bit"), Plan())
    module["wide"].grad = torch.ones_like(module["wide"])
    optimizer.step()
    first, last = module["wide"][0], module["wide"][-1]
    assert torch.equal(first, last)
    assert not torch.equal(last, torch.ones_like(last))


def piece_of(
    weight: Tensor, gradient: Tensor, states: dict[str, Tensor], constants: Constants, **other: Any
) -> StateChunk:
    steps = torch.ones(1, device=weight.device)
    salts = torch.tensor([salt("0/weight")], dtype=torch.int32, device=weight.device)
    return StateChunk(
        weight=weight,
        low=None,
        gradient=gradient,
        states=states,
        factor=None,
        step=steps[0],
        words=words(steps, salts, constants)[0],
        constants=constants,
        parameter=weight,
        runs=other.get("runs"),
    )


def move_on_gpu(piece: StateChunk, states: dict[str, Tensor], refused: Tensor | None) -> None:
    from trimaran.optim.kernels import adamw  # noqa: PLC0415  Triton is there where CUDA is

    adamw.move_on_gpu(piece, states, refused)
