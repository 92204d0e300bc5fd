"""int8 and int4 weights with torchao: in a module that becomes a graph, and in a Hugging Face folder."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.serve.exports.compare_logits import Logits, quiet_packages, require_package

Width = Literal["int8", "int4"]
GROUP = 32  # int4 values that share a scale


def torchao_config(width: Width) -> Any:
    """Return torchao's setting: int8 with a scale for each row, or int4 with one for each 32 values of a row."""
    ao = require_package("torchao.quantization", where="--quantise")
    if width == "int8":
        return ao.Int8WeightOnlyConfig()
    granularity = require_package("torchao.quantization.granularity", where="--quantise").PerGroup(GROUP)
    return ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity)  # pyrefly: ignore[missing-attribute]


def is_quantised(module: nn.Module, name: str) -> bool:
    """Return whether a module gets quantised weights: every linear layer whose rows are whole groups, but the head."""
    return isinstance(module, nn.Linear) and not name.endswith("lm_head") and module.in_features % GROUP == 0


class PackedInt4Linear(nn.Module):
    """A linear layer whose weight torchao has quantised to int4, with two values in a byte.

    torchao's own tensor has one value in a byte, and a graph with its operators loads only where torchao is imported.
    """

    def __init__(self, values: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        """`values` [out, in] are int8 between -8 and 7, `scale` [out, in / GROUP]."""
        super().__init__()
        shifted = (values + 8).to(torch.uint8)
        self.register_buffer("packed", shifted[:, ::2] | (shifted[:, 1::2] << 4))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        packed, scale = self.get_buffer("packed"), self.get_buffer("scale")
        values = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).to(x.dtype) - 8
        weight = (values.unflatten(1, (-1, GROUP)) * scale.unsqueeze(-1)).flatten(1)
        return nn.functional.linear(x, weight, self.bias)


def quantise_linears(module: nn.Module, width: Width) -> int:
    """Quantise the linear layers of a module in place, as plain tensors that a graph can hold. Return their number."""
    ao = require_package("torchao.quantization", where="--quantise")
    names = [name for name, part in module.named_modules() if is_quantised(part, name)]
    if not names:
        raise UserError("K070.no-linear-layer", where="--quantise", group=GROUP)
    ao.quantize_(module, torchao_config(width), filter_fn=is_quantised)
    if width == "int8":
        require_package("torchao.utils", where="--quantise").unwrap_tensor_subclass(module)
        return len(names)
    for name in names:
        linear: Any = module.get_submodule(name)
        assert not linear.weight.zero_point.any(), "torchao quantises symmetrically"
        module.set_submodule(name, PackedInt4Linear(linear.weight.qdata, linear.weight.scale, linear.bias))
    return len(names)


def quantise_hf_folder(source: Path, target: Path, width: Width) -> None:
    transformers = require_package("transformers", where="--quantise")
    require_package("torchao", where="--quantise")
    with quiet_packages():
        transformers.utils.logging.disable_progress_bar()
        config = transformers.TorchAoConfig(torchao_config(width))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, local_files_only=True, quantization_config=config, dtype=torch.float32
        )
        kinds = {type(each) for each in model.parameters()} - {nn.Parameter, Tensor}
        if not kinds:
            raise UserError("K070.torchao-finds", where="--quantise")
        model.save_pretrained(target)


def hf_logits(folder: Path) -> Logits | None:
    """Return how transformers computes logits with a folder; None if it is missing or does not know the model."""
    if find_spec("transformers") is None:
        return None
    transformers = require_package("transformers", where="--to hf")
    with quiet_packages():
        transformers.utils.logging.disable_progress_bar()
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, dtype=torch.float32
            )
        except ValueError:  # an architecture that AutoModelForCausalLM does not have
            return None

    @torch.no_grad()
    def logits(tokens: Tensor) -> Tensor:
        return model.eval()(input_ids=tokens, use_cache=False).logits.float()

    return logits
