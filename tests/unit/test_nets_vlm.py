"""The model that sees: transformers computes the same logits from the same files, and pictures keep to themselves."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import (
    AutoModelForImageTextToText,
    LlavaConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
)

from tests.ranks import run_ranks
from trimaran.core import UserError
from trimaran.models import VLM_PRESETS, ProjectorSpec, VlmSpec
from trimaran.models.from_hf_vlm import vlm_from_disk
from trimaran.models.to_hf_vlm import vlm_to_disk
from trimaran.models.vlm import CLIP_MEAN, CLIP_STD, VisionBlock
from trimaran.nets import Vlm, initialise, network_of
from trimaran.nets.vlm_weights import load_vlm_weights, vlm_tensors

IMAGE = 300
TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
GRID = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "rope_theta": 1e4}
TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": 301, "vision_end_token_id": 302, "video_token_id": 303}
EYE = {"depth": 3, "num_heads": 2, "patch_size": 4}
CLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
CONFIGS: dict[str, Any] = {
    "qwen2-vl": Qwen2VLConfig(
        text_config=TEXT | GRID, vision_config=EYE | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, **TOKENS
    ),
    "qwen2-vl-tied": Qwen2VLConfig(
        text_config=TEXT | GRID,
        vision_config=EYE | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 4, "spatial_merge_size": 1},
        tie_word_embeddings=True,
        **TOKENS,
    ),
    "qwen2.5-vl": Qwen2_5_VLConfig(
        text_config=TEXT | GRID,
        vision_config=EYE
        | {
            "hidden_size": 16,
            "out_hidden_size": 32,
            "intermediate_size": 24,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **TOKENS,
    ),
    "llava": LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=CLIP | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 4},
        image_token_index=IMAGE,
    ),
}
SHAPES = {"llava": ((4, 4), (4, 4), (4, 4))}  # rows and columns of patches; one for each picture
VARIOUS = ((4, 6), (10, 2), (6, 6))


@pytest.fixture(params=CONFIGS)
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, PreTrainedModel, Path]:
    """A random model of transformers and the folder it was saved to."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[request.param], attn_implementation="sdpa").eval()
    stir(model)
    model.save_pretrained(tmp_path)
    return request.param, model, tmp_path


def stir(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


def read_spec(folder: Path) -> VlmSpec:
    return vlm_from_disk(json.loads((folder / "config.json").read_text()), where="config.json")


def pictures(shapes: Sequence[tuple[int, int]], patch: int = 4) -> list[Tensor]:
    """Random pictures [3, height, width] of so many rows and columns of patches."""
    random = torch.Generator().manual_seed(2)
    return [
        torch.randint(0, 256, (3, rows * patch, columns * patch), generator=random, dtype=torch.uint8)
        for rows, columns in shapes
    ]


def patches_of(picture: Tensor, patch: int, merge: int) -> Tensor:
    """The patches of a picture in the order that merges: groups row by row, and in each its patches row by row."""
    _, height, width = picture.shape
    side = patch * merge
    cut = picture.reshape(3, height // side, merge, patch, width // side, merge, patch)
    return cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * patch * patch)


def inputs_of(spec: VlmSpec, seen: Sequence[Tensor], rows: Sequence[Sequence[int | None]]) -> dict[str, Tensor]:
    """A micro-batch: each row lists pictures by their number, and None for a few words between them."""
    merge, patch = spec.projector.merge, spec.vision.patch
    random = torch.Generator().manual_seed(3)
    lines = []
    for row in rows:
        line: list[Tensor] = []
        for each in row:
            words = torch.randint(0, 256, (3,), generator=random)
            count = 0 if each is None else seen[each].shape[1] * seen[each].shape[2] // (patch * merge) ** 2
            line += [words] if each is None else [torch.full((count,), spec.image_token)]
        lines.append(torch.cat(line))
    longest = max(map(len, lines))
    tokens = torch.stack([torch.cat([each, torch.full((longest - len(each),), 7)]) for each in lines])
    used = [seen[each] for row in rows for each in row if each is not None]
    empty = torch.zeros(0, 3 * patch * patch, dtype=torch.uint8)
    grids = [[each.shape[1] // patch, each.shape[2] // patch] for each in used]
    return {
        "tokens": tokens,
        "patches": torch.cat([empty, *(patches_of(each, patch, merge) for each in used)]),
        "grids": torch.tensor(grids, dtype=torch.int32).view(-1, 2),
    }


def normed(pixels: Tensor) -> Tensor:
    """Pixels [..., 3, n] as processors norm them."""
    mean, std = (torch.tensor(each)[:, None] for each in (CLIP_MEAN, CLIP_STD))
    return (pixels / 255 - mean) / std


def their_inputs(spec: VlmSpec, inputs: dict[str, Tensor], seen: Sequence[Tensor]) -> dict[str, Tensor]:
    tokens, patches = inputs["tokens"], inputs["patches"]
    if spec.vision.variant == "tiled":
        return {
            "input_ids": tokens,
            "pixel_values": normed(torch.stack(list(seen)).flatten(2)).view(-1, *seen[0].shape),
        }
    pixels = normed(patches.view(len(patches), 3, -1))
    film = pixels[:, :, None].expand(-1, -1, spec.vision.frames, -1).flatten(1)
    grids = torch.cat([torch.ones(len(inputs["grids"]), 1, dtype=torch.int64), inputs["grids"].long()], 1)
    kinds = (tokens == spec.image_token).int()
    return {"input_ids": tokens, "pixel_values": film, "image_grid_thw": grids, "mm_token_type_ids": kinds}


def their_positions(model: PreTrainedModel, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    if "image_grid_thw" not in theirs:
        return {}
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    positions, _ = model.model.get_rope_index(**{name: theirs[name] for name in names})
    return {"positions": positions}


def test_transformers_computes_the_same_logits_with_pictures_of_different_shapes(
    theirs: tuple[str, PreTrainedModel, Path],
) -> None:
    name, model, folder = theirs
    spec = read_spec(folder)
    seen = pictures(SHAPES.get(name, VARIOUS))
    inputs = inputs_of(spec, seen, [[None, 0, None, 1, None], [None, None, 2, None]])
    their = their_inputs(spec, inputs, seen)
    with torch.no_grad():
        wanted = model(**their).logits
    ours = network_of(spec)
    ours.load(folder)
    logits, balance = ours.forward(inputs | their_positions(model, their))
    assert torch.allclose(logits, wanted, atol=1e-4, rtol=1e-4), (logits - wanted).abs().max()
    assert balance == 0


def test_transformers_reads_what_we_write(theirs: tuple[str, PreTrainedModel, Path], tmp_path: Path) -> None:
    name, _, folder = theirs
    spec = read_spec(folder)
    ours = network_of(spec)
    initialise(ours.module, seed=3, spec=spec)
    stir(ours.module)
    out = tmp_path / "written"
    out.mkdir()
    save_file(dict(ours.disk_tensors()), out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(ours.disk_config()))
    model, report = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    unread = {each for each in report["missing_keys"] if "post_layernorm" not in each}  # LLaVA does not look at it
    assert not any([unread, report["unexpected_keys"], report["mismatched_keys"]])
    seen = pictures(SHAPES.get(name, VARIOUS))
    inputs = inputs_of(spec, seen, [[0, None, 1], [None, 2, None]])
    their = their_inputs(spec, inputs, seen)
    with torch.no_grad():
        wanted = model.eval()(**their).logits
        logits, _ = ours.forward(inputs | their_positions(model, their))
    assert torch.allclose(logits, wanted, atol=1e-4, rtol=1e-4), (logits - wanted).abs().max()
    again = network_of(read_spec(out))
    again.load(out)
    for (key, one), other in zip(again.module.named_parameters(), ours.module.parameters(), strict=True):
        assert torch.equal(one, other), key


OLD_NAMES = {
    "qwen2-vl": {"visual.": "model.visual.", "model.": "model.language_model."},
    "llava": {"vision_tower.": "vision_tower.vision_model."},
}


@pytest.mark.parametrize("theirs", OLD_NAMES, indirect=True)
def test_names_of_other_releases_are_read_too(theirs: tuple[str, PreTrainedModel, Path]) -> None:
    name, _, folder = theirs
    spec, wanted = read_spec(folder), Vlm(read_spec(folder))
    load_vlm_weights(wanted, folder)
    prefixes = OLD_NAMES[name]
    renamed = {}
    for key, value in load_file(folder / "model.safetensors").items():
        first = next((each for each in prefixes if key.startswith(each)), "")
        renamed[prefixes.get(first, "") + key.removeprefix(first)] = value
    save_file(renamed, folder / "model.safetensors")
    module = Vlm(spec)
    load_vlm_weights(module, folder)
    for (key, one), other in zip(module.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(one, other), key


def test_weights_of_another_model_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    module = filled(NATIVE)
    tensors = dict(vlm_tensors(module))
    del tensors["visual.blocks.0.norm1.weight"]
    tensors["visual.merger.mlp.0.bias"] = torch.zeros(3)
    tensors["visual.stranger"] = torch.zeros(1)
    write(tmp_path, NATIVE, tensors)
    fresh = Vlm(NATIVE)
    before = [each.clone() for each in fresh.parameters()]
    with pytest.raises(UserError, match=r"missing: visual\.blocks\.0\.norm1\.weight") as caught:
        load_vlm_weights(fresh, tmp_path)
    assert caught.value.code == "M021"
    assert "of another shape: visual.merger.mlp.0.bias [3] (the model has [64])" in caught.value.what
    assert "unexpected: visual.stranger" in caught.value.what
    assert all(torch.equal(one, other) for one, other in zip(before, fresh.parameters(), strict=True))


_LANGUAGE = replace(VLM_PRESETS["tiny"].language, layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8)
NATIVE = replace(
    VLM_PRESETS["tiny"],
    vision=replace(VLM_PRESETS["tiny"].vision, layers=3, hidden=16, heads=2, ffn=32, patch=4),
    projector=ProjectorSpec(merge=2, hidden=64),
    language=_LANGUAGE,
    sections=(2, 1, 1),
)
TILED = replace(
    VLM_PRESETS["tiny-tiled"],
    vision=replace(
        VLM_PRESETS["tiny-tiled"].vision,
        layers=3,
        hidden=16,
        heads=2,
        ffn=32,
        patch=4,
        tile=16,
        block=VisionBlock(qk_norm=True, scaled=True, qkv_bias=False),
    ),
    language=replace(_LANGUAGE, block=VLM_PRESETS["tiny-tiled"].language.block),
)
WINDOWED = replace(NATIVE, vision=replace(NATIVE.vision, window=16, full_layers=(2,)))
SPECS = {
    "native": NATIVE,
    "tiled": TILED,
    "windowed": WINDOWED,
    "untied": replace(NATIVE, language=replace(_LANGUAGE, tied=False)),
}
CUTS = ((1, 5), (3, 1, 2), (4, 2), (2, 2, 2), (5, 1), (1, 1, 1, 1, 1, 1))


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> VlmSpec:
    return SPECS[request.param]


def filled(spec: VlmSpec, blocks: range | None = None) -> Vlm:
    module = Vlm(spec, blocks)
    initialise(module, seed=5, spec=spec)
    return module


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def write(folder: Path, spec: VlmSpec, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(vlm_to_disk(spec)))


def some_inputs(spec: VlmSpec) -> dict[str, Tensor]:
    seen = pictures(((4, 4), (4, 4), (4, 4)) if spec.vision.variant == "tiled" else VARIOUS)
    inputs = inputs_of(spec, seen, [[None, 0, None, 1, None], [None, None, 2, None]])
    inputs["documents"] = torch.zeros_like(inputs["tokens"], dtype=torch.int32)
    inputs["documents"][0, 15:] = 1
    if spec.sections:
        length = inputs["tokens"].shape[1]
        inputs["positions"] = torch.randint(0, length, (3, 2, length), generator=torch.Generator().manual_seed(4))
    return inputs


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


def test_stages_write_what_the_whole_writes_and_read_their_own_back(spec: VlmSpec, tmp_path: Path) -> None:
    whole = dict(vlm_tensors(filled(spec)))
    for counts in CUTS:
        stages = [range(start, stop) for start, stop in pairwise([0, *accumulate(counts)])]
        parts = [dict(vlm_tensors(filled(spec, blocks))) for blocks in stages]
        assert [name for part in parts for name in part] == list(whole)
    write(tmp_path, spec, whole)
    for blocks in (range(2), range(2, 5), range(5, 6)):
        stage, wanted = Vlm(spec, blocks), filled(spec, blocks)
        load_vlm_weights(stage, tmp_path)
        for (name, ours), theirs in zip(stage.named_parameters(), wanted.parameters(), strict=True):
            assert torch.equal(ours, theirs), name


def test_pictures_packed_together_are_seen_as_each_by_itself(spec: VlmSpec) -> None:
    module, merge = filled(spec), spec.projector.merge
    seen = pictures(((4, 4), (4, 4)) if spec.vision.variant == "tiled" else VARIOUS)
    patches = [patches_of(each, 4, merge) for each in seen]
    grids = [torch.tensor([[each.shape[1] // 4, each.shape[2] // 4]], dtype=torch.int32) for each in seen]
    together = module.encode(torch.cat(patches), torch.cat(grids))
    alone = torch.cat([module.encode(*each) for each in zip(patches, grids, strict=True)])
    assert together.shape == (sum(map(len, patches)) // merge**2, spec.feature_width)
    assert torch.allclose(together, alone, atol=1e-5)


def test_a_window_sees_nothing_of_the_next_before_a_full_layer() -> None:
    spec = replace(WINDOWED, vision=replace(WINDOWED.vision, full_layers=()))
    (picture,) = pictures(((8, 4),))
    other = picture.clone()
    other[:, 16:] = 255 - other[:, 16:]  # the lower window
    grid = torch.tensor([[8, 4]], dtype=torch.int32)
    one, two = (filled(spec).encode(patches_of(each, 4, 2), grid) for each in (picture, other))
    assert torch.equal(one[:4], two[:4]), "groups of the upper window"
    assert not torch.allclose(one[4:], two[4:])
    full, changed = (filled(NATIVE).encode(patches_of(each, 4, 2), grid) for each in (picture, other))
    assert not torch.allclose(full[:4], changed[:4])


def test_documents_of_a_row_do_not_see_each_other(spec: VlmSpec) -> None:
    seen = pictures(((4, 4), (4, 4)))
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
    seen = pictures(((4, 4),))
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


def test_first_weights_depend_on_the_name_and_not_on_the_stage_or_the_order(spec: VlmSpec) -> None:
    whole = dict(filled(spec).named_parameters())
    for blocks in (range(1), range(1, 4), range(4, 6)):
        for name, parameter in filled(spec, blocks).named_parameters():
            assert torch.equal(parameter, whole[name]), name
    down = whole["vision.layers.0.mlp.down_proj.weight"].std().item()
    assert down == pytest.approx(1 / (spec.vision.ffn * 2 * spec.vision.layers) ** 0.5, rel=0.1)
    spoken = whole["language.layers.0.mlp.down_proj.weight"].std().item()
    assert spoken == pytest.approx(0.02 / (2 * spec.language.layers) ** 0.5, rel=0.1)


def halves(spec: VlmSpec, mesh: DeviceMesh) -> Vlm:
    """A model of which each of two ranks holds half: rows of what goes in, columns of what comes out of a branch."""
    module = Vlm(spec)
    for name, owner in module.named_modules():
        for leaf, parameter in list(owner.named_parameters(recurse=False)):
            across = parameter.ndim > 1 and name.endswith(("o_proj", "down_proj", "linear_2"))
            placed = distribute_tensor(torch.empty_like(parameter), mesh, [Shard(1 if across else 0)])
            owner.register_parameter(leaf, nn.Parameter(placed))
    module._apply(lambda x: x)  # ties what is tied
    return module


def fill_halves(folder: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for name, spec in SPECS.items():
        wanted = dict(filled(spec).named_parameters())
        split = halves(spec, mesh)
        initialise(split, seed=5, spec=spec)
        for key, parameter in split.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), wanted[key]), key
        read = halves(spec, mesh)
        load_vlm_weights(read, folder / name)
        written = dict(vlm_tensors(read))
        there = load_file(folder / name / "model.safetensors")
        assert written.keys() == there.keys()
        assert all(torch.equal(written[key], there[key]) for key in there)
    dist.destroy_process_group()


def test_values_do_not_depend_on_the_sharding(tmp_path: Path) -> None:
    for name, spec in SPECS.items():
        (tmp_path / name).mkdir()
        module = filled(spec)
        stir(module)
        write(tmp_path / name, spec, {key: value.clone() for key, value in vlm_tensors(module)})
    run_ranks(2, fill_halves, tmp_path)
