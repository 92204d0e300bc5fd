"""Weights of linear layers in 8 or 4 bits: a decode step reads half or a quarter of the memory."""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.core.optional_packages import FP8_FEATURE_MULTIPLE, MIN_FP8_FEATURES
from trimaran.infer.serving_layers import replace_projections
from trimaran.nets import Network
from trimaran.nets.decoder import DecoderLayer

Quantisation = Literal["fp8", "int8", "int4"]
FP8 = torch.float8_e4m3fn
MIN_FP8_CAPABILITY = (9, 0)  # one scale for each row needs Hopper
INT4_GROUP = 128  # weights that share a scale and a zero point

log = logging.getLogger(__name__)


@torch.no_grad()
def quantise(network: Network, kind: Quantisation, device: torch.device) -> None:
    """Quantise the linear layers of the network's blocks in place. Embedding, head, norms and experts stay as they are.

    The weights must be on the GPU `device`. fp8: one scale for each row of a weight and for each token, matmuls in fp8.
    int8: one scale for each row; int4: groups of 128 weights; both multiply in bf16. A layer that the kernels do not
    support is left out. Names change: weights can be loaded before this, not after.
    """
    convert = _converter(kind, device)
    count = 0
    for block in network.blocks:
        if isinstance(block, DecoderLayer):
            replace_projections(block)
        layers = [each for each in block.modules() if type(each) is nn.Linear and _is_convertible(each, kind)]
        for each in layers:
            convert(each)
        count += len(layers)
    if not count:
        raise UserError("E052", f"no layer of this model can be quantised to {kind}", where="--quantise",
                        fix="leave --quantise out: the model is too small, or its layers are not plain linear ones")  # fmt: skip
    log.info("%d linear layers have %s weights", count, kind)


class Fp8WeightLinear(nn.Linear):
    """A linear layer with an e4m3 weight, whose inputs are cast to e4m3 too. Created by `quantise`."""

    weight_scale: Tensor  # fp32 [1, out_features]

    def forward(self, input: Tensor) -> Tensor:
        from trimaran.nets.kernels.fp8_rows import fp8_rows  # noqa: PLC0415 - only a GPU has Triton

        rows, scales = fp8_rows(input.flatten(0, -2))
        out = torch._scaled_mm(
            rows, self.weight.t(), scales, self.weight_scale, bias=self.bias, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip
        return out.unflatten(0, input.shape[:-1])


def scaled_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `weight` in e4m3, and the fp32 scales [rows, 1] that its rows were divided by."""
    scales = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / torch.finfo(FP8).max
    return (weight.float() / scales).to(FP8), scales


def _to_fp8(layer: nn.Linear) -> None:
    weight, scales = scaled_rows(layer.weight)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.to(torch.bfloat16), requires_grad=False)
    layer.__class__ = Fp8WeightLinear
    layer.register_buffer("weight_scale", scales.t().contiguous(), persistent=False)


def _converter(kind: Quantisation, device: torch.device) -> Callable[[nn.Linear], None]:
    if device.type != "cuda":
        raise UserError("E050", f"{kind} weights need an NVIDIA GPU, and the model is on a CPU", where="--quantise",
                        fix="leave --quantise out, or serve on a GPU")  # fmt: skip
    if kind == "fp8":
        if torch.cuda.get_device_capability(device) < MIN_FP8_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            raise UserError("E050", f"{name} has no fp8 matmul with a scale for each row", where="--quantise",
                            fix="use int8 or int4, or a GPU of the Hopper generation or newer")  # fmt: skip
        return _to_fp8
    try:
        from torchao.quantization import (  # pyrefly: ignore[missing-import]  # noqa: PLC0415 - an extra
            Int4WeightOnlyConfig,
            Int8WeightOnlyConfig,
            quantize_,
        )
    except ImportError as error:
        raise UserError("E051", f"{kind} weights need the torchao package ({error})", where="--quantise",
                        fix="pip install 'trimaran[quant]', or use fp8") from error  # fmt: skip
    # This packing is that of torch's own int4 kernel; the default one needs another package.
    int4: dict[str, Any] = {"group_size": INT4_GROUP, "int4_packing_format": "tile_packed_to_4d"}
    config = Int8WeightOnlyConfig() if kind == "int8" else Int4WeightOnlyConfig(**int4)

    def convert(layer: nn.Linear) -> None:
        layer.to(torch.bfloat16)
        quantize_(layer, config)

    return convert


def _is_convertible(layer: nn.Linear, kind: Quantisation) -> bool:
    multiple = INT4_GROUP if kind == "int4" else FP8_FEATURE_MULTIPLE
    sizes = (layer.in_features, layer.out_features)
    return min(sizes) >= MIN_FP8_FEATURES and layer.in_features % multiple == 0 and sizes[1] % 16 == 0
