"""LLaVA-OneVision trains with images of any resolution as transformers does, from files to gradients."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from tests.vlm_models import IMAGE, TEXT, perturb
from trimaran.core import ModelSection, UserError
from trimaran.data import ImageArrays, SamplePacker, fill_patches, grids_of, measure_images
from trimaran.models import VlmSpec, spec_of, vlm_from_disk
from trimaran.nets import HfVlmNetwork, network_of_hf
from trimaran.serve import PromptImage, place_images

TILE, PATCH = 20, 6  # three patches per side, and two pixels that make none
SIZES = ((33, 21), (20, 20), (70, 90), (81, 79), (9, 64))  # width, height
PINPOINTS = [[row * TILE, column * TILE] for row in range(1, 5) for column in range(1, 5)]
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER |= {"model_type": "siglip_vision_model", "image_size": TILE, "patch_size": PATCH, "vision_use_head": False}


def config(**changes: Any) -> LlavaOnevisionConfig:
    given: dict[str, Any] = {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": TOWER,
        "image_token_index": IMAGE,
        "video_token_index": IMAGE + 1,
        "image_grid_pinpoints": PINPOINTS,
    }
    return LlavaOnevisionConfig(**(given | changes))


def model_and_network() -> tuple[Any, HfVlmNetwork]:
    torch.manual_seed(0)
    model = LlavaOnevisionForConditionalGeneration._from_config(config(), attn_implementation="sdpa").eval()
    perturb(model)
    network = network_of_hf(model, spec())
    assert isinstance(network, HfVlmNetwork)
    return model, network


def spec() -> VlmSpec:
    return vlm_from_disk(config().to_dict(), where="config.json")


def image_of(size: tuple[int, int]) -> Image.Image:
    rng = np.random.default_rng(size)
    return Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


class Files:
    """Image files in memory, by number."""

    image_sizes = np.array(SIZES)

    def image_bytes(self, number: int) -> bytes:
        image_of(SIZES[number]).save(file := io.BytesIO(), "PNG")
        return file.getvalue()


class Sample:
    """A sample with one image between some text."""

    tokens = np.array([5, 6, IMAGE, 7, 8, 9])
    targets = np.ones(6, dtype=bool)


def inputs_of(numbers: list[int]) -> dict[str, Tensor]:
    """Return a micro-batch with one sample and image in a row, made as the data pipeline does it."""
    rules, files = spec().images(), Files()
    packer = SamplePacker(rules, limit=10**6)
    samples = [packer.pack(Sample(), np.array([SIZES[each]])) for each in numbers]  # pyrefly: ignore[bad-argument-type]
    patches = sum(int(grid.prod(1).sum()) for each in samples for grid in each.grids)
    images = ImageArrays(files, rules, patches, None)  # pyrefly: ignore[bad-argument-type]
    images.begin_micro_batch()
    for number, sample in zip(numbers, samples, strict=True):
        images.append([number], sample.grids, sample.layouts)
    longest = max(map(len, samples))
    tokens = [np.pad(each.tokens, (0, longest - len(each)), constant_values=7) for each in samples]
    return {name: torch.from_numpy(each) for name, each in {"tokens": np.stack(tokens), **images.arrays()}.items()}


def their_inputs(numbers: list[int], tokens: Tensor) -> dict[str, Tensor]:
    mean = [0.5, 0.5, 0.5]
    processor = LlavaOnevisionImageProcessorPil(
        size={"height": TILE, "width": TILE}, image_grid_pinpoints=PINPOINTS, image_mean=mean, image_std=mean
    )
    nested: Any = [[image_of(SIZES[each])] for each in numbers]
    values = processor(images=nested, return_tensors="pt")
    return {"input_ids": tokens, "pixel_values": values["pixel_values"], "image_sizes": values["image_sizes"]}


def test_logits_and_gradients_equal_those_of_transformers_with_its_own_processor() -> None:
    model, network = model_and_network()
    numbers = list(range(len(SIZES)))
    inputs = inputs_of(numbers)
    wanted = model(**their_inputs(numbers, inputs["tokens"]), use_cache=False).logits
    wanted.logsumexp(-1).sum().backward()
    theirs = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    logits, _ = network.forward(inputs)
    assert (logits - wanted).abs().max() <= 1e-5 * wanted.abs().max(), (logits - wanted).abs().max()
    logits.logsumexp(-1).sum().backward()
    ours = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert ours.keys() == theirs.keys()
    assert "model.image_newline" in ours
    largest = max(float(each.abs().max()) for each in theirs.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-5 * largest, rtol=1e-3, msg=name)


def test_the_number_of_tokens_is_that_of_the_layout() -> None:
    rules = spec().images()
    sizes = np.random.default_rng(0).integers(5, 300, (60, 2))
    packer = SamplePacker(rules, limit=10**6)
    measured = measure_images(sizes, rules)
    for size, tokens, patches in zip(sizes, measured.tokens, measured.patches, strict=True):
        packed = packer.pack(Sample(), size[None])  # pyrefly: ignore[bad-argument-type]
        assert len(packed) == 5 + tokens
        assert int(packed.grids[0].prod(1).sum()) == patches
        layout = packed.layouts[0]
        assert layout.sources.max() < patches
        np.testing.assert_allclose(layout.weights.sum(1), 1, rtol=1e-6)


def test_packed_documents_do_not_attend_to_each_other_and_text_alone_has_gradients() -> None:
    model, network = model_and_network()
    both, first, second = inputs_of([0, 2]), inputs_of([0]), inputs_of([2])
    lengths = [each["tokens"].shape[1] for each in (first, second)]
    packed = both | {"tokens": torch.cat([first["tokens"], second["tokens"]], 1)}
    packed["documents"] = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths)).int()[None]
    with torch.no_grad():
        together = network.forward(packed)[0].split(lengths, 1)
        for ours, alone in zip(together, (first, second), strict=True):
            torch.testing.assert_close(ours, network.forward(alone)[0], atol=1e-5, rtol=1e-4)
    text = {"tokens": torch.arange(12)[None]}
    network.forward(text)[0].sum().backward()
    assert all(each.grad is not None for each in model.parameters() if each.requires_grad)


def test_family_vlm_and_generation_with_images_are_refused(tmp_path: Any) -> None:
    config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"use model\.family hf") as caught:
        spec_of(ModelSection(family="vlm", path=str(tmp_path)))
    assert caught.value.code == "M076"
    rules = spec().images()
    grids = grids_of(SIZES[0], rules)
    patches = np.zeros((int(grids.prod(1).sum()), 3 * PATCH**2), dtype=np.uint8)
    fill_patches(Files().image_bytes(0), SIZES[0], rules, patches)
    with pytest.raises(UserError, match="generation does not arrange the tiles") as caught:
        place_images(Sample.tokens, [PromptImage(patches, SIZES[0])], rules)
    assert caught.value.code == "M077"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"image_grid_pinpoints": PINPOINTS[:-1]}, "image_grid_pinpoints"),
        ({"vision_aspect_ratio": "anyres_max_4"}, "vision_aspect_ratio is 'anyres_max_4'"),
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2"),
    ],
)
def test_what_we_do_not_arrange_is_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        vlm_from_disk(config(**change).to_dict(), where="config.json")
    assert caught.value.code == "M034"
