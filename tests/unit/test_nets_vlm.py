"""The model that sees: images and documents keep to themselves, stages are the whole, and every tower learns."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.vlm_models import (
    CUTS,
    NATIVE,
    SPECS,
    TILED,
    VARIOUS,
    WINDOWED,
    filled,
    images,
    inputs_of,
    patches_of,
    some_inputs,
    stir,
)
from trimaran.models import VlmSpec
from trimaran.nets import Vlm, initialise, network_of


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> VlmSpec:
    return SPECS[request.param]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("counts", CUTS)
def test_stages_one_after_the_other_are_the_whole(spec: VlmSpec, counts: tuple[int, ...]) -> None:
    inputs, edges = some_inputs(spec), [0, *accumulate(counts)]
    wanted, _ = filled(spec)(**inputs)
    stream: tuple[Tensor, ...] = ()
    for start, stop in pairwise(edges):
        network = network_of(spec, range(start, stop))
        initialise(network.module, seed=5, spec=spec)
        entering, leaving = network.stream_shape(inputs, tp=1)
        assert not stream or stream[0].shape == entering
        stream = (network.forward(inputs, *stream)[0],)
        assert stop == spec.layers or stream[0].shape == leaving
    assert torch.equal(stream[0], wanted)


def test_stages_hold_every_parameter_once_but_for_a_tied_embedding(spec: VlmSpec) -> None:
    whole = [name for name, _ in filled(spec).named_parameters(remove_duplicate=False)]
    for counts in CUTS:
        held: list[str] = []
        for start, stop in pairwise([0, *accumulate(counts)]):
            held += [name for name, _ in Vlm(spec, range(start, stop)).named_parameters(remove_duplicate=False)]
        copies = [name for name in held if held.count(name) > 1]
        assert set(copies) <= ({"language.embed_tokens.weight"} if spec.tied else set())
        assert sorted(set(held)) == sorted(whole)


def test_pictures_packed_together_are_seen_as_each_by_itself(spec: VlmSpec) -> None:
    module, merge = filled(spec), spec.projector.merge
    seen = images(((4, 4), (4, 4)) if spec.vision.variant == "tiled" else VARIOUS)
    patches = [patches_of(each, 4, merge) for each in seen]
    grids = [torch.tensor([[each.shape[1] // 4, each.shape[2] // 4]], dtype=torch.int32) for each in seen]
    together = module.encode(torch.cat(patches), torch.cat(grids))
    alone = torch.cat([module.encode(*each) for each in zip(patches, grids, strict=True)])
    assert together.shape == (sum(map(len, patches)) // merge**2, spec.feature_width)
    assert torch.allclose(together, alone, atol=1e-5)


def test_a_window_sees_nothing_of_the_next_before_a_full_layer() -> None:
    spec = replace(WINDOWED, vision=replace(WINDOWED.vision, full_layers=()))
    (image,) = images(((8, 4),))
    other = image.clone()
    other[:, 16:] = 255 - other[:, 16:]  # the lower window
    grid = torch.tensor([[8, 4]], dtype=torch.int32)
    one, two = (filled(spec).encode(patches_of(each, 4, 2), grid) for each in (image, other))
    assert torch.equal(one[:4], two[:4]), "groups of the upper window"
    assert not torch.allclose(one[4:], two[4:])
    full, changed = (filled(NATIVE).encode(patches_of(each, 4, 2), grid) for each in (image, other))
    assert not torch.allclose(full[:4], changed[:4])


def test_documents_of_a_row_do_not_see_each_other(spec: VlmSpec) -> None:
    seen = images(((4, 4), (4, 4)))
    together = inputs_of(spec, seen, [[None, 0, None, None, 1, None]])
    cut = 3 + (together["tokens"][0] == spec.image_token).sum().item() // 2 + 3
    together["documents"] = (torch.arange(together["tokens"].shape[1])[None] >= cut).int()
    module = filled(spec)
    logits, _ = module(**together)
    for number, part in enumerate((slice(None, cut), slice(cut, None))):
        half = len(together["patches"]) // 2
        alone, _ = module(
            tokens=together["tokens"][:, part],
            patches=together["patches"][number * half :][:half],
            grids=together["grids"][number : number + 1],
        )
        assert torch.allclose(alone, logits[:, part], atol=1e-5)


def test_the_picture_changes_only_what_comes_after_it(spec: VlmSpec) -> None:
    seen = images(((4, 4),))
    inputs, module = inputs_of(spec, seen, [[None, 0, None]]), filled(spec)
    one, _ = module(**inputs)
    two, _ = module(**inputs | {"patches": 255 - inputs["patches"]})
    assert torch.equal(one[:, :3], two[:, :3])
    assert not torch.allclose(one[:, 3:], two[:, 3:])


@pytest.mark.parametrize("empty", [{}, {"patches": torch.zeros(0, 48, dtype=torch.uint8), "grids": torch.zeros(0, 2)}])
def test_without_a_picture_the_text_is_what_the_language_alone_says_and_every_weight_has_a_gradient(
    spec: VlmSpec, empty: dict[str, Tensor]
) -> None:
    module, tokens = filled(spec), torch.arange(24).view(2, 12)
    logits, _ = module(tokens=tokens, **empty)
    assert module.language is not None
    assert torch.equal(logits, module.language(tokens=tokens)[0])
    logits.sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert name.startswith("language.") or not parameter.grad.any(), name


def test_every_weight_of_every_tower_learns_from_a_picture(spec: VlmSpec) -> None:
    module = filled(spec)
    module(**some_inputs(spec))[0].square().sum().backward()
    for name, parameter in module.named_parameters():
        assert _gradient(parameter).any(), name


def test_features_computed_before_take_the_place_of_the_patches(spec: VlmSpec) -> None:
    module, inputs = filled(spec), some_inputs(spec)
    wanted, _ = module(**inputs)
    features = module.encode(inputs.pop("patches"), inputs.pop("grids")).detach()
    logits, _ = module(**inputs, features=features)
    assert torch.equal(logits, wanted)
    text = {"tokens": torch.arange(12)[None]}
    nothing, _ = module(**text, features=features[:0])
    assert torch.equal(nothing, module(**text)[0])


def test_a_frozen_tower_keeps_nothing_for_backward_and_the_rest_has_the_same_gradients() -> None:
    trained, frozen = filled(NATIVE), filled(NATIVE)
    assert frozen.vision is not None
    frozen.vision.requires_grad_(False)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        frozen.vision.register_forward_hook(lambda *_: kept.append(-1))
        out, _ = frozen(**some_inputs(NATIVE))
    assert kept[0] == -1, "the first thing that is kept comes after the tower"
    out.square().sum().backward()
    trained(**some_inputs(NATIVE))[0].square().sum().backward()
    for (name, one), other in zip(frozen.named_parameters(), trained.parameters(), strict=True):
        if name.startswith("vision."):
            assert one.grad is None
        else:
            assert torch.equal(_gradient(one), _gradient(other)), name


def test_a_tile_of_another_size_than_the_table_has_its_positions_interpolated() -> None:
    larger = replace(TILED, vision=replace(TILED.vision, tile=32, ends=replace(TILED.vision.ends, table=4)))
    module = filled(larger)
    assert module.vision is not None
    assert module.vision.stem is not None
    stem = module.vision.stem
    with torch.no_grad():
        assert stem.positions is not None
        assert stem.positions.shape == (17, 16)
        stem.positions[1:] = torch.arange(4.0)[:, None, None].expand(4, 4, 16).reshape(16, 16)  # grows with the row
    places = stem._places(64)[1:]
    rows = torch.arange(8)[:, None].expand(8, 8).reshape(4, 2, 4, 2).transpose(1, 2).flatten()
    mean_of_row = torch.stack([places[rows == row].mean() for row in range(8)])
    assert (mean_of_row.diff() > 0).all()
    assert (places[rows == 3].std(0) < 1e-5).all()
    wanted = F.interpolate(torch.arange(4.0)[None, None], size=8, mode="linear", align_corners=False)
    assert torch.allclose(mean_of_row, wanted.flatten(), atol=0.15)


def test_positions_of_time_row_and_column_that_are_equal_are_the_usual_ones() -> None:
    module, tokens = filled(NATIVE), torch.arange(24).view(2, 12)
    stir(module)  # first weights are so small that attention hardly looks at positions
    places = torch.arange(12).expand(3, 2, 12)
    assert torch.allclose(module(tokens=tokens, positions=places)[0], module(tokens=tokens)[0], atol=1e-6)
    moved = places.clone()
    moved[1, :, 6:] += 5
    assert not torch.allclose(module(tokens=tokens, positions=moved)[0], module(tokens=tokens)[0], atol=1e-4)
