"""Hugging Face models that see on a GPU: the numbers of their own forward, and the host never waits."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.vlm_models import CONFIGS, SHAPES, VARIOUS, images, inputs_of, stir, their_inputs, their_positions
from trimaran.models import VlmSpec
from trimaran.models.from_hf_vlm import vlm_from_disk
from trimaran.nets.hf_vlm import HfVlmNetwork, network_of_hf

pytestmark = pytest.mark.gpu

ROWS = [[None, 0, None, 1, None], [None, None, 2, None]]
NEAR = 0.03  # of the norm of a gradient, in bf16


def model_of(name: str) -> tuple[Any, VlmSpec]:
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[name])
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    stir(model)
    return model.cuda(), vlm_from_disk(config.to_dict(), where="config.json")


def on_gpu(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A micro-batch as the loader brings it: on the device, with what the host knows beside."""
    documents = torch.zeros_like(inputs["tokens"], dtype=torch.int32)
    known = {"host_grids": inputs["grids"], "host_documents": documents}
    return {name: each.cuda() for name, each in (inputs | {"documents": documents}).items()} | known


def gradients_of(model: Any, logits: Tensor) -> Tensor:
    """All gradients in a row; they are cleared."""
    logits.float().logsumexp(-1).sum().backward()
    found = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_are_those_of_the_models_own_forward_and_the_host_never_waits(name: str) -> None:
    model, spec = model_of(name)
    seen = images(SHAPES.get(name, VARIOUS))
    inputs = inputs_of(spec, seen, ROWS)
    their = {each: tensor.cuda() for each, tensor in their_inputs(spec, inputs, seen).items()}
    inputs |= {each: tensor.cpu() for each, tensor in their_positions(model, their).items()}
    wanted = gradients_of(model, model(**their, use_cache=False).logits)
    network, batch = network_of_hf(model, spec), on_gpu(inputs)
    assert isinstance(network, HfVlmNetwork)
    gradients_of(model, network.forward(batch)[0])  # libraries that are loaded at the first use may wait
    for each in (batch, {name: batch[name] for name in ("tokens", "documents", "host_documents")}):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            gradients_of(model, network.forward(each)[0])
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                logits, _ = network.forward(each)
                logits.float().logsumexp(-1).sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = gradients_of(model, network.forward(batch)[0])
    assert (found - wanted).norm() < NEAR * wanted.norm()
    assert (gradients_of(model, network.forward(batch)[0]) - wanted).norm() < 1e-3 * wanted.norm()
