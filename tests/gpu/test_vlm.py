"""Our vision-language model on a GPU: the same results as on the CPU, and the host never synchronises."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from trimaran.core import Mesh, Plan
from trimaran.data import StepBatch
from trimaran.models import VLM_PRESETS, VlmSpec
from trimaran.nets import Network, Vlm, initialise, layout_patches, network_of
from trimaran.parallel import RankMesh, apply_compile, freeze_towers
from trimaran.train import LanguageObjective

pytestmark = pytest.mark.gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")
TINY = VLM_PRESETS["tiny"]
WINDOWED = replace(TINY, vision=replace(TINY.vision, window=32, full_layers=(2,)))
SPECS = {"native": TINY, "windowed": WINDOWED, "tiled": VLM_PRESETS["tiny-tiled"]}
VARIOUS = ((4, 6), (10, 8), (12, 4))
IMAGES = pytest.mark.parametrize("has_images", [True, False], ids=["images", "no images"])
BF16_TOLERANCE = 0.03  # relative to the norm of the gradients

Grids = Sequence[tuple[int, int]]


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> VlmSpec:
    return SPECS[request.param]


def grids_for(spec: VlmSpec, *, has_images: bool = True) -> Grids:
    return () if not has_images else ((6, 6),) * 3 if spec.vision.variant == "tiled" else VARIOUS


def step_of(spec: VlmSpec, shapes: Grids) -> StepBatch:
    """Return a step of one micro-batch: a row with two documents and up to two images, and a row with up to one."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (1, 2, 64), generator=random)
    labels = torch.randint(0, 256, (1, 2, 64), generator=random)
    labels[:, :, ::3] = -100
    counts = [rows * columns // 4 for rows, columns in shapes]
    for (row, start), count in zip(((0, 3), (0, 32), (1, 9)), counts, strict=False):
        tokens[0, row, start : start + count] = spec.image_token
    documents = torch.zeros(1, 2, 64, dtype=torch.int32)
    documents[0, 0, 31:] = 1
    total = sum(rows * columns for rows, columns in shapes)
    arrays = {
        "tokens": tokens,
        "labels": labels,
        "documents": documents,
        "patches": torch.randint(0, 256, (total, 3 * spec.vision.patch**2), generator=random, dtype=torch.uint8),
        "grids": torch.tensor(shapes, dtype=torch.int32).view(-1, 2),
    }
    if spec.sections:
        arrays["positions"] = torch.randint(0, 64, (1, 3, 2, 64), generator=random)
    num_valid = int((labels >= 0).sum())
    return StepBatch(0, arrays, num_valid, offsets={"patches": (0, total), "grids": (0, len(shapes))})


def network_on(spec: VlmSpec, device: torch.device, freeze: Sequence[str] = ()) -> Network:
    network = network_of(spec)
    initialise(network.module, seed=0, spec=spec)
    freeze_towers(network, freeze)
    network.module.to(device)
    return network


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, on the CPU: its mean loss, and the gradients of the trained parameters."""

    loss: float
    grads: dict[str, Tensor]

    def error(self, other: "StepResult") -> float:
        """Return the largest difference of a gradient, relative to the norm of all."""
        assert self.grads.keys() == other.grads.keys()
        norm = torch.stack([each.norm() for each in other.grads.values()]).norm()
        return max(float((each - other.grads[name]).norm() / norm) for name, each in self.grads.items())


def backward(network: Network, batch: StepBatch, device: torch.device, *, half: bool = False) -> Tensor:
    """Compute the gradients of the step's mean loss, and return the loss. The batch must be on the device."""
    network.module.zero_grad()
    inputs = batch.micro(0)
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        logits, _ = network.forward(inputs)
        loss = LanguageObjective().losses(network, logits, inputs).total / batch.num_valid
    loss.backward()
    return loss


def trained(network: Network, batch: StepBatch, device: torch.device, *, half: bool = False) -> StepResult:
    loss = backward(network, batch.to(device), device, half=half)
    named = network.module.named_parameters()
    return StepResult(loss.item(), {name: each.grad.cpu().clone() for name, each in named if each.grad is not None})


@IMAGES
def test_losses_and_gradients_equal_those_of_the_cpu(spec: VlmSpec, has_images: bool) -> None:
    batch = step_of(spec, grids_for(spec, has_images=has_images))
    wanted = trained(network_on(spec, CPU), batch, CPU)
    found = trained(network_on(spec, GPU), batch, GPU)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-4)
    assert found.error(wanted) < 1e-3
    tower = [each for name, each in found.grads.items() if name.startswith("vision.")]
    assert tower, "it takes part even without images"
    assert any(each.any() for each in tower) == has_images


@IMAGES
def test_the_host_never_synchronises_with_the_device_in_half_precision(spec: VlmSpec, has_images: bool) -> None:
    host = step_of(spec, grids_for(spec, has_images=has_images))
    wanted = trained(network_on(spec, CPU), host, CPU)
    network, batch = network_on(spec, GPU), host.to(GPU)
    backward(network, batch, GPU, half=True)  # libraries may synchronise at their first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backward(network, batch, GPU, half=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = trained(network, host, GPU, half=True)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-2)
    assert found.error(wanted) < BF16_TOLERANCE


def test_a_frozen_tower_has_no_gradient_and_changes_no_other(spec: VlmSpec) -> None:
    batch = step_of(spec, grids_for(spec))
    full = trained(network_on(spec, GPU), batch, GPU)
    frozen = trained(network_on(spec, GPU, ["vision"]), batch, GPU)
    rest = {name: each for name, each in full.grads.items() if not name.startswith("vision.")}
    assert frozen.loss == pytest.approx(full.loss, rel=1e-6)
    assert frozen.error(replace(full, grads=rest)) < 1e-5


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_cached_features_replace_the_patches(spec: VlmSpec, half: bool) -> None:
    batch = step_of(spec, grids_for(spec))
    network = network_on(spec, GPU, ["vision"])
    wanted = trained(network, batch, GPU, half=half)
    assert isinstance(network.module, Vlm)
    with torch.no_grad(), torch.autocast(GPU.type, torch.bfloat16, enabled=half):
        features = network.module.encode(batch.arrays["patches"].to(GPU), batch.arrays["grids"].to(GPU)).cpu()
    stored = features.view(torch.uint16) if features.dtype == torch.bfloat16 else features  # the dtype of the cache
    others = {name: each for name, each in batch.arrays.items() if name not in ("patches", "grids")}
    cached = replace(batch, arrays=others | {"features": stored}, offsets={"features": (0, len(stored))})
    found = trained(network_on(spec, GPU, ["vision"]), cached, GPU, half=half)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-3 if half else 1e-5)
    assert found.error(wanted) < (BF16_TOLERANCE if half else 1e-4)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_compiled_blocks_do_not_recompile_for_other_images(spec: VlmSpec, half: bool) -> None:
    eager, compiled = network_on(spec, GPU), network_on(spec, GPU)
    one_rank = cast(RankMesh, SimpleNamespace(degrees=Mesh()))
    apply_compile(compiled, Plan(compile=True), one_rank)
    torch._dynamo.reset()
    counters.clear()
    if spec.vision.variant == "tiled":
        steps: list[Grids] = [((6, 6),) * number for number in (3, 2, 0, 1, 3, 0, 2)]
    else:
        steps = [VARIOUS, ((4, 4), (8, 6)), (), ((6, 8),), ((2, 2), (4, 10), (6, 4)), (), ((8, 8), (2, 12))]
    graphs = []
    for shapes in steps:
        batch = step_of(spec, shapes)
        found, wanted = (trained(each, batch, GPU, half=half) for each in (compiled, eager))
        assert found.loss == pytest.approx(wanted.loss, rel=1e-2 if half else 1e-5)
        assert found.error(wanted) < (BF16_TOLERANCE if half else 1e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[-1] == graphs[-3], f"each step compiles: {graphs}"


def test_windows_are_the_same_without_grids_on_the_host() -> None:
    grids = torch.tensor(VARIOUS, dtype=torch.int32)
    patches = torch.zeros(int(grids.prod(1).sum()), 192, dtype=torch.uint8, device=GPU)
    with_host = layout_patches(WINDOWED.vision, 2, patches, grids.to(GPU), host_grids=grids)
    without_host = layout_patches(WINDOWED.vision, 2, patches, grids.to(GPU))
    for name in ("image_segments", "window_segments"):
        one, other = getattr(with_host, name), getattr(without_host, name)
        assert one is not None
        assert other is not None
        first, second = ([run_starts(each.ids[0].tolist())] for each in (one, other))
        assert first == second
    assert without_host.window_segments is not None
    assert without_host.window_segments.max_length == 16


def run_starts(ids: list[int]) -> list[int]:
    """Return where the runs of equal ids start."""
    return [0, *(index for index, (one, other) in enumerate(pairwise(ids), start=1) if one != other)]
