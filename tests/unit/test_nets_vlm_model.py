"""Our vision-language model: images and documents are separate, stages equal the full model, all towers learn."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.vlm_models import (
    NATIVE,
    SPECS,
    STAGE_SPLITS,
    TILED,
    VARIOUS,
    WINDOWED,
    initialised,
    inputs_of,
    patches_of,
    perturb,
    random_images,
    some_inputs,
)
from trimaran.models import VlmSpec
from trimaran.nets import Vlm, initialise, network_of


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> VlmSpec:
    return SPECS[request.param]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("counts", STAGE_SPLITS)
def test_consecutive_stages_compute_the_same_as_the_full_model(spec: VlmSpec, counts: tuple[int, ...]) -> None:
    inputs, edges = some_inputs(spec), [0, *accumulate(counts)]
    wanted, _ = initialised(spec)(**inputs)
    stream: tuple[Tensor, ...] = ()
    for start, stop in pairwise(edges):
        network = network_of(spec, range(start, stop))
        initialise(network.module, seed=5, spec=spec)
        input_shape, output_shape = network.stream_shape(inputs, tp=1)
        assert not stream or stream[0].shape == input_shape
        stream = (network.forward(inputs, *stream)[0],)
        assert stop == spec.layers or stream[0].shape == output_shape
    assert torch.equal(stream[0], wanted)


def test_stages_hold_every_parameter_once_except_a_tied_embedding(spec: VlmSpec) -> None:
    names = [name for name, _ in initialised(spec).named_parameters(remove_duplicate=False)]
    for counts in STAGE_SPLITS:
        held: list[str] = []
        for start, stop in pairwise([0, *accumulate(counts)]):
            held += [name for name, _ in Vlm(spec, range(start, stop)).named_parameters(remove_duplicate=False)]
        copies = [name for name in held if held.count(name) > 1]
        assert set(copies) <= ({"language.embed_tokens.weight"} if spec.tied else set())
        assert sorted(set(held)) == sorted(names)


def test_packed_images_are_encoded_as_if_each_were_alone(spec: VlmSpec) -> None:
    module, merge = initialised(spec), spec.projector.merge
    images = random_images(((4, 4), (4, 4)) if spec.vision.variant == "tiled" else VARIOUS)
    patches = [patches_of(each, 4, merge) for each in images]
    grids = [torch.tensor([[each.shape[1] // 4, each.shape[2] // 4]], dtype=torch.int32) for each in images]
    together = module.encode(torch.cat(patches), torch.cat(grids))
    alone = torch.cat([module.encode(*each) for each in zip(patches, grids, strict=True)])
    assert together.shape == (sum(map(len, patches)) // merge**2, spec.feature_width * module.num_projections)
    assert torch.allclose(together, alone, atol=1e-5)


def test_a_window_does_not_attend_to_the_next_one_without_a_full_layer() -> None:
    spec = replace(WINDOWED, vision=replace(WINDOWED.vision, full_layers=()))
    (image,) = random_images(((8, 4),))
    other = image.clone()
    other[:, 16:] = 255 - other[:, 16:]  # the lower window
    grid = torch.tensor([[8, 4]], dtype=torch.int32)
    one, two = (initialised(spec).encode(patches_of(each, 4, 2), grid) for each in (image, other))
    assert torch.equal(one[:4], two[:4]), "tokens of the upper window"
    assert not torch.allclose(one[4:], two[4:])
    full, changed = (initialised(NATIVE).encode(patches_of(each, 4, 2), grid) for each in (image, other))
    assert not torch.allclose(full[:4], changed[:4])


def test_documents_of_a_row_do_not_attend_to_each_other(spec: VlmSpec) -> None:
    images = random_images(((4, 4), (4, 4)))
    together = inputs_of(spec, images, [[None, 0, None, None, 1, None]])
    cut = 3 + (together["tokens"][0] == spec.image_token).sum().item() // 2 + 3
    together["documents"] = (torch.arange(together["tokens"].shape[1])[None] >= cut).int()
    module = initialised(spec)
    logits, _ = module(**together)
    for number, part in enumerate((slice(None, cut), slice(cut, None))):
        half = len(together["patches"]) // 2
        alone, _ = module(
            tokens=together["tokens"][:, part],
            patches=together["patches"][number * half :][:half],
            grids=together["grids"][number : number + 1],
        )
        assert torch.allclose(alone, logits[:, part], atol=1e-5)


def test_an_image_changes_only_later_logits(spec: VlmSpec) -> None:
    images = random_images(((4, 4),))
    inputs, module = inputs_of(spec, images, [[None, 0, None]]), initialised(spec)
    one, _ = module(**inputs)
    two, _ = module(**inputs | {"patches": 255 - inputs["patches"]})
    assert torch.equal(one[:, :3], two[:, :3])
    assert not torch.allclose(one[:, 3:], two[:, 3:])


@pytest.mark.parametrize("empty", [{}, {"patches": torch.zeros(0, 48, dtype=torch.uint8), "grids": torch.zeros(0, 2)}])
def test_without_images_the_logits_are_those_of_the_language_model_and_every_weight_has_a_gradient(
    spec: VlmSpec, empty: dict[str, Tensor]
) -> None:
    module, tokens = initialised(spec), torch.arange(24).view(2, 12)
    logits, _ = module(tokens=tokens, **empty)
    assert module.language is not None
    assert torch.equal(logits, module.language(tokens=tokens)[0])
    logits.sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert name.startswith("language.") or not parameter.grad.any(), name


def test_every_weight_of_every_tower_gets_a_gradient_from_an_image(spec: VlmSpec) -> None:
    module = initialised(spec)
    module(**some_inputs(spec))[0].square().sum().backward()
    for name, parameter in module.named_parameters():
        assert _gradient(parameter).any(), name


def test_cached_features_replace_the_patches(spec: VlmSpec) -> None:
    module, inputs = initialised(spec), some_inputs(spec)
    wanted, _ = module(**inputs)
    features = module.encode(inputs.pop("patches"), inputs.pop("grids")).detach()
    logits, _ = module(**inputs, features=features)
    assert torch.equal(logits, wanted)
    text = {"tokens": torch.arange(12)[None]}
    nothing, _ = module(**text, features=features[:0])
    assert torch.equal(nothing, module(**text)[0])


def test_a_frozen_tower_saves_nothing_for_backward_and_the_rest_has_the_same_gradients() -> None:
    trained, frozen = initialised(NATIVE), initialised(NATIVE)
    assert frozen.vision is not None
    frozen.vision.requires_grad_(False)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        frozen.vision.register_forward_hook(lambda *_: saved.append(-1))
        out, _ = frozen(**some_inputs(NATIVE))
    assert saved[0] == -1, "the first saved tensor comes after the tower"
    out.square().sum().backward()
    trained(**some_inputs(NATIVE))[0].square().sum().backward()
    for (name, one), other in zip(frozen.named_parameters(), trained.parameters(), strict=True):
        if name.startswith("vision."):
            assert one.grad is None
        else:
            assert torch.equal(_gradient(one), _gradient(other)), name


def test_positions_are_interpolated_if_the_tile_has_another_size_than_the_table() -> None:
    larger = replace(TILED, vision=replace(TILED.vision, tile=32, ends=replace(TILED.vision.ends, table=4)))
    module = initialised(larger)
    assert module.vision is not None
    assert module.vision.stem is not None
    stem = module.vision.stem
    with torch.no_grad():
        assert stem.positions is not None
        assert stem.positions.shape == (17, 16)
        stem.positions[1:] = torch.arange(4.0)[:, None, None].expand(4, 4, 16).reshape(16, 16)  # grows with the row
    table = stem.position_table(64)
    assert table is not None
    positions = table[1:]
    rows = torch.arange(8)[:, None].expand(8, 8).reshape(4, 2, 4, 2).transpose(1, 2).flatten()
    mean_of_row = torch.stack([positions[rows == row].mean() for row in range(8)])
    assert (mean_of_row.diff() > 0).all()
    assert (positions[rows == 3].std(0) < 1e-5).all()
    wanted = F.interpolate(torch.arange(4.0)[None, None], size=8, mode="linear", align_corners=False)
    assert torch.allclose(mean_of_row, wanted.flatten(), atol=0.15)


def test_equal_positions_of_time_row_and_column_give_the_usual_rotation() -> None:
    module, tokens = initialised(NATIVE), torch.arange(24).view(2, 12)
    perturb(module)  # initial weights are so small that positions hardly matter
    positions = torch.arange(12).expand(3, 2, 12)
    assert torch.allclose(module(tokens=tokens, positions=positions)[0], module(tokens=tokens)[0], atol=1e-6)
    moved = positions.clone()
    moved[1, :, 6:] += 5
    assert not torch.allclose(module(tokens=tokens, positions=moved)[0], module(tokens=tokens)[0], atol=1e-4)
