"""Hugging Face vision-language models compute the same from our micro-batches as from their own inputs."""

import io
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

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
from trimaran.core import Plan, UserError
from trimaran.data import fill_patches, grids_of
from trimaran.models import VlmSpec, vlm_from_disk
from trimaran.nets import HfVlmNetwork, insert_rows, network_of_hf
from trimaran.planner import check_hf_model

ROWS = [[None, 0, None, 1, None], [None, None, 2, None]]  # text, and images by their number
TEXT = [[None, None, None, None], [None, None]]


def model_of(name: str) -> tuple[Any, VlmSpec]:
    torch.manual_seed(0)
    config = deepcopy(CONFIGS[name])
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    perturb(model)
    return model, vlm_from_disk(config.to_dict(), where="config.json")


def vlm_network_of(model: Any, spec: VlmSpec) -> HfVlmNetwork:
    network = network_of_hf(model, spec)
    assert isinstance(network, HfVlmNetwork)
    return network


def take_gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a scalar that depends on every logit, and clear them."""
    logits.logsumexp(-1).sum().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_logits_and_gradients_equal_those_of_the_models_own_forward(name: str) -> None:
    model, spec = model_of(name)
    images = random_images(SHAPES.get(name, VARIOUS))
    inputs = inputs_of(spec, images, ROWS)
    their = hf_inputs(spec, inputs, images)
    inputs |= hf_positions(model, their)
    wanted = model(**their, use_cache=False).logits
    gradients = take_gradients(model, wanted)
    names = [each for each, _ in model.named_parameters()]
    network = vlm_network_of(model, spec)
    logits, _ = network.forward(inputs)
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-4)
    ours = take_gradients(model, logits)
    assert [each for each, _ in model.named_parameters()] == names
    assert ours.keys() == gradients.keys()
    for each, gradient in gradients.items():
        torch.testing.assert_close(ours[each], gradient, atol=1e-4, rtol=1e-3, msg=each)
    assert network.head is model.lm_head


def test_logits_equal_those_of_the_model_with_its_own_image_processor() -> None:
    model, spec = model_of("qwen2-vl")
    size, rules = (30, 21), spec.images()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
    between = {"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels}
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=between)
    theirs = processor(images=image, return_tensors="pt")
    grids = torch.from_numpy(grids_of(size, rules)).int()
    count = int(grids.prod()) // 4
    tokens = torch.cat([torch.arange(5), torch.full((count,), spec.image_token), torch.arange(9)])[None]
    patches = np.empty((4 * count, 3 * 4 * 4), dtype=np.uint8)
    image.save(file := io.BytesIO(), "PNG")
    fill_patches(file.getvalue(), size, rules, patches)
    kinds = {"mm_token_type_ids": (tokens == spec.image_token).int(), "image_grid_thw": theirs["image_grid_thw"]}
    with torch.no_grad():
        wanted = model(input_ids=tokens, pixel_values=theirs["pixel_values"], **kinds, use_cache=False).logits
        positions, _ = model.model.get_rope_index(tokens, **kinds)
        inputs = {"tokens": tokens, "patches": torch.from_numpy(patches), "grids": grids, "positions": positions}
        torch.testing.assert_close(vlm_network_of(model, spec).forward(inputs)[0], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_documents_do_not_attend_to_each_other(name: str) -> None:
    model, spec = model_of(name)
    network, images = vlm_network_of(model, spec), random_images(SHAPES.get(name, VARIOUS))
    inputs = inputs_of(spec, images, [[0, None, 1, None]])
    first = len(inputs_of(spec, images, [[0, None]])["tokens"][0])
    length, first_patches = inputs["tokens"].shape[1], int(inputs["grids"][0].prod())
    inputs["positions"] = torch.cat([torch.arange(first), torch.arange(length - first)]).expand(3, 1, -1)
    documents = (torch.arange(length) >= first).int()[None]
    with torch.no_grad():
        together = network.forward(inputs | {"documents": documents})[0]
        assert not torch.allclose(network.forward(inputs)[0], together)
        for tokens, numbers in ((slice(0, first), slice(0, 1)), (slice(first, None), slice(1, None))):
            own = {"tokens": inputs["tokens"][:, tokens], "positions": inputs["positions"][:, :, tokens]}
            patches = inputs["patches"][:first_patches] if tokens.start == 0 else inputs["patches"][first_patches:]
            alone = network.forward(own | {"patches": patches, "grids": inputs["grids"][numbers]})[0]
            torch.testing.assert_close(together[:, tokens], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_without_images_every_parameter_has_a_gradient_and_the_vision_tower_has_no_effect(name: str) -> None:
    model, spec = model_of(name)
    inputs = inputs_of(spec, [], TEXT)
    with torch.no_grad():
        wanted = model(input_ids=inputs["tokens"], use_cache=False).logits
    logits, _ = vlm_network_of(model, spec).forward(inputs)
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-4)
    gradients = take_gradients(model, logits)
    trained = {each for each, parameter in model.named_parameters() if parameter.requires_grad}
    assert gradients.keys() == trained
    assert all(not each.any() for name, each in gradients.items() if "visual" in name or "vision" in name)


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_towers_have_every_parameter_and_blocks_are_in_the_order_of_the_forward(name: str) -> None:
    model, spec = model_of(name)
    network = vlm_network_of(model, spec)
    order: list[Any] = []
    for block in network.blocks:
        block.register_forward_hook(lambda module, *_: order.append(module))
    images = random_images(SHAPES.get(name, VARIOUS))
    network.forward(inputs_of(spec, images, ROWS))
    assert tuple(order) == network.blocks
    assert len(network.blocks) == spec.layers + (name == "llava")  # its patch embedding is not split either
    names = [each for each, _ in model.named_parameters()]
    assert {each for each in names if not each.startswith(tuple(network.towers.values()))} <= {"lm_head.weight"}
    assert all(any(each.startswith(prefix) for each in names) for prefix in network.towers.values())


@pytest.fixture
def compilations() -> Iterator[Any]:
    torch.compiler.reset()
    counters.clear()
    yield counters
    torch.compiler.reset()


@pytest.mark.slow
def test_vision_and_language_compile_without_graph_breaks_and_not_again_after_two_steps(compilations: Any) -> None:
    model, spec = model_of("qwen2-vl")
    network = vlm_network_of(model, spec)
    for block in network.blocks:
        block.compile(backend="eager", fullgraph=True)
    graphs = []
    for shapes in (((4, 6), (4, 4)), ((6, 6), (4, 2)), ((2, 4), (8, 8))):
        inputs = inputs_of(spec, random_images(shapes), [[None, 0, None, 1, None]])
        inputs["tokens"] = torch.cat([inputs["tokens"][0], torch.zeros(64, dtype=torch.int64)])[None, :64]
        network.forward(inputs)[0].sum().backward()
        graphs.append(compilations["stats"]["unique_graphs"])
    assert graphs[0] == 3  # a vision layer, the projector, a decoder layer
    assert len(set(graphs[1:])) == 1
    assert not compilations["graph_break"]


def test_rows_are_inserted_in_order_and_get_the_gradients_of_their_positions() -> None:
    stream, rows = torch.zeros(2, 4, 3, requires_grad=True), torch.arange(9.0).view(3, 3).requires_grad_()
    index = torch.tensor([[-1, 0, 1, -1], [-1, -1, -1, 2]])
    out = insert_rows(stream, rows, index)
    wanted = torch.zeros(2, 4, 3)
    wanted[0, 1], wanted[0, 2], wanted[1, 3] = rows.detach()
    assert torch.equal(out, wanted)
    factors = torch.arange(24.0).view(2, 4, 3)
    (out * factors).sum().backward()
    assert rows.grad is not None
    assert stream.grad is not None
    assert torch.equal(rows.grad, torch.stack([factors[0, 1], factors[0, 2], factors[1, 3]]))
    assert torch.equal(stream.grad, factors * (index < 0).unsqueeze(-1))


def test_a_model_with_an_unsupported_configuration_is_refused() -> None:
    model, spec = model_of("llava")
    model.config.projector_hidden_act = "relu"
    with pytest.raises(UserError, match=r"M035.*projector_hidden_act is 'relu'"):
        network_of_hf(model, None)
    model, spec = model_of("llava")
    model.config.text_config.attention_dropout = 0.1
    with pytest.raises(UserError, match=r"M035.*its own attention implementation"):
        network_of_hf(model, spec)


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "ep"])
def test_only_data_parallelism_applies(axis: str) -> None:
    _, spec = model_of("qwen2-vl")
    mesh = {axis: 2} | ({"dp_replicate": 2} if axis == "ep" else {})
    with pytest.raises(UserError, match="P013") as error:
        check_hf_model(Plan.model_validate({"mesh": mesh}), spec)
    assert error.value.where == f"plan.mesh.{axis}"
    check_hf_model(Plan.model_validate({"mesh": {"dp_shard": 2}, "sharding": "parameters"}), spec)
