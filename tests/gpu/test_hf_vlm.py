"""Hugging Face vision-language models on a GPU equal their own forward, and the host never synchronises."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.vlm_models import (
    CONFIGS,
    HF_CONFIGS,
    SHAPES,
    VARIOUS,
    hf_inputs,
    hf_positions,
    inputs_of,
    perturb,
    random_images,
)
from trimaran.models import VlmSpec, vlm_from_disk
from trimaran.nets import HfVlmNetwork, network_of_hf

pytestmark = pytest.mark.gpu

ROWS = [[None, 0, None, 1, None], [None, None, 2, None]]
BF16_TOLERANCE = 0.03  # relative to the norm of the gradients


def model_of(name: str) -> tuple[Any, VlmSpec]:
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[name])
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    perturb(model)
    return model.cuda(), vlm_from_disk(config.to_dict(), where="config.json")


def on_gpu(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a micro-batch as the loader gives it: on the device, with host copies of grids and documents."""
    documents = torch.zeros_like(inputs["tokens"], dtype=torch.int32)
    on_host = {"host_grids": inputs["grids"], "host_documents": documents}
    return {name: each.cuda() for name, each in (inputs | {"documents": documents}).items()} | on_host


def gradients_of(model: Any, logits: Tensor) -> Tensor:
    """Return all gradients, concatenated, and clear them."""
    logits.float().logsumexp(-1).sum().backward()
    gradients = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_results_equal_the_models_own_forward_and_the_host_never_synchronises(name: str) -> None:
    model, spec = model_of(name)
    images = random_images(SHAPES.get(name, VARIOUS))
    inputs = inputs_of(spec, images, ROWS)
    their = {each: tensor.cuda() for each, tensor in hf_inputs(spec, inputs, images).items()}
    inputs |= {each: tensor.cpu() for each, tensor in hf_positions(model, their).items()}
    wanted = gradients_of(model, model(**their, use_cache=False).logits)
    network, batch = network_of_hf(model, spec), on_gpu(inputs)
    assert isinstance(network, HfVlmNetwork)
    gradients_of(model, network.forward(batch)[0])  # libraries may synchronise at their first use
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
    assert (found - wanted).norm() < BF16_TOLERANCE * wanted.norm()
    assert (gradients_of(model, network.forward(batch)[0]) - wanted).norm() < 1e-3 * wanted.norm()
