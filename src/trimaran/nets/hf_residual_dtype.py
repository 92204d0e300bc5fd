"""In which arithmetic the stream of a Hugging Face model flows: the plan's, from the embedding on."""

from typing import Any

import torch
from torch import Tensor, nn


def cast_stream(module: Any) -> None:
    """Let the stream have autocast's dtype from the embedding on, where autocast is on; tables of rotation stay fp32.

    Autocast alone would leave the stream, which is as wide as the embedding's weights, in fp32: every sum, norm and
    copy between two products would move twice the bytes. Only hooks are added: names and code stay what they are.
    """
    module.get_input_embeddings().register_forward_hook(_in_autocast)
    for part in module.modules():
        if type(part).__name__.endswith("RotaryEmbedding"):
            part.register_forward_pre_hook(_asked_for_fp32)


def _in_autocast(embedding: nn.Module, _: Any, out: Tensor) -> Tensor:
    device = out.device.type
    return out.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else out


def _asked_for_fp32(rotary: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the arguments with an fp32 tensor in the place of the stream, which tells device, shape and dtype only.

    A table in bf16 would turn the later positions of a long sequence by a wrong angle.
    """
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return None
    stand_in = torch.empty((), dtype=torch.float32, device=args[0].device).expand(args[0].shape)
    return stand_in, *args[1:]
