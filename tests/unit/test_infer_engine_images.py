"""Requests with images in one batch with others: the same tokens as one after another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_models import CPU, GREEDY, answers_of, new_engine, tokens_of
from trimaran.core import ModelSection
from trimaran.models import spec_of
from trimaran.nets import Network, initialise, load_hf_model, network_of, network_of_hf
from trimaran.serve import EngineRequest
from trimaran.train import CachedLogits, Generation, NextTokenModel, PlacedImage, TokenSampler


def own_network(name: str) -> Network:
    from tests import vlm_models  # noqa: PLC0415 - it imports transformers

    spec = vlm_models.SPECS[name]
    network = network_of(spec)
    initialise(network.module, seed=5, spec=spec)
    vlm_models.perturb(network.module)
    network.module.eval()
    return network


def hf_vlm(name: str, folder: Path) -> Network:
    from transformers import AutoModelForImageTextToText  # noqa: PLC0415

    from tests import vlm_models  # noqa: PLC0415 - it imports transformers

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(vlm_models.CONFIGS[name])
    vlm_models.perturb(model)
    model.save_pretrained(folder)
    module = load_hf_model(folder, trust_remote_code=False, seed=0).eval()
    return network_of_hf(module, spec_of(ModelSection(family="hf", path=str(folder))))


def request_with_images(spec: Any, name: str, order: list[int | None], max_tokens: int) -> EngineRequest:
    """Return a request in which images, by number, and a few text tokens (None) follow each other."""
    from tests import vlm_models  # noqa: PLC0415 - it imports transformers

    shapes = vlm_models.SHAPES["llava"] if spec.vision.tile else vlm_models.VARIOUS
    images = vlm_models.random_images(shapes, spec.vision.patch)
    inputs = vlm_models.inputs_of(spec, images, [order])
    tokens, merge = inputs["tokens"][0].tolist(), spec.projector.merge
    placed, at, patch_at = [], 0, 0
    numbers = [each for each in order if each is not None]
    for grid in inputs["grids"].numpy()[: len(numbers)]:
        at = tokens.index(spec.image_token, at)
        count = int(grid.prod())
        patches = inputs["patches"].numpy()[patch_at : patch_at + count]
        placed.append(PlacedImage(patches, grid[None], at, merge))
        at, patch_at = at + count // merge**2, patch_at + count
    return EngineRequest(id=name, prompt=tuple(tokens), sampling=GREEDY, max_tokens=max_tokens, images=tuple(placed))


def alone(network: Network, request: EngineRequest) -> list[int]:
    spec: Any = network.spec
    cached = CachedLogits(network, CPU, has_grid=bool(spec.sections))
    cached.images = list(request.images)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        found = cached(ids)
        found[spec.image_token] = float("-inf")  # the engine never generates a part of an image
        return found

    model = NextTokenModel(logits, network.max_seq_len)
    generation = Generation(model, request.prompt, TokenSampler(GREEDY), max_tokens=request.max_tokens)
    generation.slides = False
    return list(generation)


@pytest.mark.parametrize("name", ["native", "llava", "deepstack", pytest.param("tiled", marks=pytest.mark.slow),
                                  pytest.param("qwen2-vl", marks=pytest.mark.slow),
                                  pytest.param("qwen2.5-vl", marks=pytest.mark.slow)])  # fmt: skip
def test_images_and_texts_in_one_batch_get_the_tokens_that_they_get_alone(name: str, tmp_path: Path) -> None:
    from tests import vlm_models  # noqa: PLC0415 - it imports transformers

    network = own_network(name) if name in vlm_models.SPECS else hf_vlm(name, tmp_path)
    orders: list[list[int | None]] = [
        [None, 0, None],
        [None] * 3,
        [None, 0, None, 1, None],
        [2, None, None],
        [None, 0, None],
    ]
    requests = [
        request_with_images(network.spec, str(number), order, 6 + number) for number, order in enumerate(orders)
    ]
    requests[4] = replace(requests[0], id="4", max_tokens=10)
    expected = {each.id: alone(network, each) for each in requests}
    assert len({token for row in expected.values() for token in row}) > 4
    largest = max(image.stop - image.first for each in requests for image in each.images)
    for overlap in (False, True):
        engine = new_engine(network, num_pages=26, max_running=4, max_step_tokens=4 + largest, overlap=overlap)
        assert tokens_of(answers_of(engine, requests, [0, 1, 1, 2, 9])) == expected
        assert engine.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("name", ["llava", pytest.param("qwen2-vl", marks=pytest.mark.slow)])
@torch.no_grad()
def test_tokens_after_images_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText  # noqa: PLC0415

    from tests import vlm_models  # noqa: PLC0415 - it imports transformers

    network = hf_vlm(name, tmp_path)
    spec: Any = network.spec
    order: list[int | None] = [None, 0, None, 1, None]
    shapes = vlm_models.SHAPES.get(name, vlm_models.VARIOUS)
    images = vlm_models.random_images(shapes, spec.vision.patch)
    inputs = vlm_models.inputs_of(spec, images, [order])
    theirs = vlm_models.hf_inputs(spec, inputs, images[:2])
    model: Any = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = inputs["tokens"]
    out = model.generate(**theirs, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                         suppress_tokens=[spec.image_token])  # fmt: skip
    request = request_with_images(spec, "a", order, 12)
    assert request.prompt == tuple(ids[0].tolist())
    found = tokens_of(answers_of(new_engine(network, max_step_tokens=48), [request, replace(request, id="b")]))
    assert found["a"] == found["b"] == out[0, ids.shape[1] :].tolist()
