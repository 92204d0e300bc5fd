"""fp8 with a scale per block: the arithmetic against independent references, and which plans may use it."""

import pytest
import torch
from torch import Tensor

from trimaran.core import Plan, UserError
from trimaran.machine import parse_cluster
from trimaran.parallel import dequantized, fp8_blocks, in_mx_blocks, in_row_blocks, in_square_blocks, in_tiles, linear
from trimaran.planner import check_fp8_recipe

# The relative error of a product of two e4m3 operands, see tests/unit/test_fp8.py. Powers of two scale less closely.
ERROR = {"block": 0.042, "mx": 0.047}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers with outliers, and blocks of very different sizes."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    values[::7] *= 100
    values[:, : shape[1] // 2] *= 1e-3
    return values


def reference(x: Tensor, tall: int, wide: int) -> tuple[Tensor, Tensor]:
    """Return fp8 values and scales, block by block in Python."""
    values, scales = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x) // tall, x.shape[1] // wide)
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            place = slice(row * tall, (row + 1) * tall), slice(column * wide, (column + 1) * wide)
            scales[row, column] = x[place].abs().max() / 448
            values[place] = (x[place] / scales[row, column]).to(torch.float8_e4m3fn)
    return values, scales


@pytest.mark.parametrize(("cast", "tall"), [(in_row_blocks, 1), (in_square_blocks, 128)])
def test_blocks_are_those_of_a_reference(cast, tall: int) -> None:
    x = numbers(256, 384)
    values, scales = reference(x, tall, 128)
    ours = cast(x)
    assert torch.equal(ours.values.float(), values.float())
    assert torch.equal(ours.scales, scales)
    assert (dequantized(ours) - x).abs().max() <= x.abs().max() / 16


def test_mx_blocks_are_those_of_torchao() -> None:
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = numbers(64, 256).bfloat16()
    theirs = mx_tensor.to_mx(x, torch.float8_e4m3fn, 32)
    ours = in_mx_blocks(x)
    assert torch.equal(ours.scales, theirs[0].view(torch.uint8).view(64, 8))
    assert torch.equal(ours.values.float(), theirs[1].float().view(64, 256))


def test_a_block_of_zeros_stays_zero_and_an_inf_becomes_nan() -> None:
    x = torch.zeros(128, 256)
    x[0, 200] = torch.inf
    for cast in (in_row_blocks, in_square_blocks, in_mx_blocks):
        values = dequantized(cast(x))
        assert not values[:, :128].any()
        assert values[0, 200].isnan()


@pytest.mark.parametrize("recipe", ERROR)
@pytest.mark.parametrize("rows", [128, 70])
def test_a_layer_and_its_gradients_are_as_exact_as_e4m3(recipe: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, rows, 256, generator=generator).bfloat16().requires_grad_()
    weight = (0.02 * torch.randn(384, 256, generator=generator)).requires_grad_()
    gradient = torch.randn(2, rows, 384, generator=generator).bfloat16()
    out = linear(x, weight, recipe)
    out.backward(gradient)
    flat, true = x.detach().double().view(-1, 256), weight.detach().double()
    sums = gradient.double().view(-1, 384)
    assert x.grad is not None
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    found = {out.view(-1, 384): flat @ true.t(), x.grad.view(-1, 256): sums @ true, weight.grad: sums.t() @ flat}
    for ours, theirs in found.items():
        assert 0.02 < (ours.detach().double() - theirs).norm() / theirs.norm() < ERROR[recipe]


def gradients_of(run, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 384, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(128, 384, generator=generator).to(dtype).requires_grad_()
    out = run(x, weight, "block")
    out.backward(torch.randn(256, 128, generator=generator).bfloat16())
    assert x.grad is not None
    assert weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_casts_by_operators_change_no_bit_and_are_compiled_whole(dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradients_of(linear, dtype)
    monkeypatch.setattr(fp8_blocks, "has_kernels", lambda device_type: True)  # as on a GPU; the casts are torch's
    whole = torch.compile(linear, fullgraph=True, backend="aot_eager")
    for run in (linear, whole):
        assert all(torch.equal(a, b) for a, b in zip(gradients_of(run, dtype), expected, strict=True))


def test_scales_of_operators_lie_as_cublas_reads_them() -> None:
    values, scales, turned, turned_scales = torch.ops.trimaran.fp8_row_blocks(torch.randn(256, 384), True, True)
    assert (values.shape, scales.shape) == ((256, 384), (3, 256))
    assert (turned.shape, turned_scales.shape) == ((384, 256), (2, 384))
    _, none, *_ = torch.ops.trimaran.fp8_row_blocks(torch.randn(256, 384), False, True)
    assert none.numel() == 0


def test_a_weight_of_other_sizes_is_multiplied_in_bf16() -> None:
    x, weight = torch.randn(4, 192).bfloat16(), torch.randn(256, 192)
    assert torch.equal(linear(x, weight, "block"), x @ weight.bfloat16().t())


def test_scales_are_tiled_as_cublas_reads_them() -> None:
    scales = torch.arange(256, dtype=torch.int32).view(64, 4).to(torch.uint8)
    tiled = in_tiles(scales).view(torch.uint8)
    assert len(tiled) == 512  # one tile of 128x4
    for row, column in ((0, 0), (5, 3), (33, 2), (63, 1)):
        assert tiled[(row % 32) * 16 + (row // 32) * 4 + column] == scales[row, column]


def plan(**fields: object) -> Plan:
    return Plan.model_validate({"precision": "fp8"} | fields)


@pytest.mark.parametrize(
    ("fields", "device", "what"),
    [
        ({"fp8": {"recipe": "mx"}}, "H100", "H100 has no fp8 matmuls"),
        ({"fp8": {"recipe": "block"}}, "B200", "B200 has no fp8 matmuls"),
        ({"fp8": {"recipe": "block"}, "precision": "bf16"}, "H100", "precision is bf16"),
        ({"fp8": {"all_gather": True}}, "H100", "weights are not sharded"),
        ({"fp8": {"all_gather": True, "recipe": "mx"}, "sharding": "parameters"}, "B200", "other blocks in backward"),
        ({"fp8": {"all_gather": True}, "sharding": "parameters", "offload": "parameters"}, "H100", "from the host"),
    ],
)
def test_plans_that_cannot_are_refused(fields: dict[str, object], device: str, what: str) -> None:
    with pytest.raises(UserError, match="P113") as refused:
        check_fp8_recipe(plan(**fields), parse_cluster(f"8x{device}"))
    assert what in refused.value.what


def test_plans_that_can_are_not_refused() -> None:
    for fields, device in (({"recipe": "mx"}, "B200"), ({"recipe": "block", "all_gather": True}, "H200")):
        check_fp8_recipe(plan(fp8=fields, sharding="parameters"), parse_cluster(f"8x{device}"))
