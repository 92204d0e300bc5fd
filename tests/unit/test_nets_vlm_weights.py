"""Our vision-language model on disk: transformers computes the same from the same files; ranks read their shards."""

import json
from copy import deepcopy
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.ranks import run_ranks
from tests.vlm_models import (
    CONFIGS,
    NATIVE,
    SHAPES,
    SPECS,
    STAGE_SPLITS,
    VARIOUS,
    hf_inputs,
    hf_positions,
    initialised,
    inputs_of,
    perturb,
    random_images,
    write,
)
from trimaran.core import UserError
from trimaran.models import VlmSpec, vlm_from_disk
from trimaran.nets import Vlm, initialise, load_vlm_weights, network_of, vlm_tensors

SPREAD = ("tiled", "deepstack", "untied")  # over two ranks
OLD_NAMES = {
    "qwen2-vl": {"visual.": "model.visual.", "model.": "model.language_model."},
    "llava": {"vision_tower.": "vision_tower.vision_model."},
}


@pytest.fixture(params=CONFIGS)
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, PreTrainedModel, Path]:
    """Return a random model of transformers and the folder it was saved to."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[request.param], attn_implementation="sdpa").eval()
    perturb(model)
    model.save_pretrained(tmp_path)
    return request.param, model, tmp_path


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> VlmSpec:
    return SPECS[request.param]


def read_spec(folder: Path) -> VlmSpec:
    return vlm_from_disk(json.loads((folder / "config.json").read_text()), where="config.json")


def test_logits_equal_those_of_transformers_for_images_of_different_shapes(
    theirs: tuple[str, PreTrainedModel, Path],
) -> None:
    name, model, folder = theirs
    spec = read_spec(folder)
    images = random_images(SHAPES.get(name, VARIOUS))
    inputs = inputs_of(spec, images, [[None, 0, None, 1, None], [None, None, 2, None]])
    their = hf_inputs(spec, inputs, images)
    with torch.no_grad():
        wanted = model(**their).logits
    ours = network_of(spec)
    ours.load(folder)
    logits, balance = ours.forward(inputs | hf_positions(model, their))
    assert (logits - wanted).abs().max() <= 1e-5 * max(1, wanted.abs().max()), (logits - wanted).abs().max()
    assert bool(balance) == (spec.language.block.experts is not None)


def test_gradients_of_packed_documents_equal_those_of_transformers_for_each_alone(
    theirs: tuple[str, PreTrainedModel, Path],
) -> None:
    name, model, folder = theirs
    spec = read_spec(folder)
    images = random_images(SHAPES.get(name, VARIOUS)[:1] * 2)
    rows = inputs_of(spec, images, [[None, 0, None], [None, 1, None]])
    their = hf_inputs(spec, rows, images)
    wanted = model(**their).logits
    wanted.logsumexp(-1).sum().backward()
    ours = network_of(spec)
    ours.load(folder)
    packed = rows | {name: each.flatten(1)[:, None] for name, each in hf_positions(model, their).items()}
    packed["tokens"] = rows["tokens"].reshape(1, -1)
    packed["documents"] = torch.arange(2, dtype=torch.int32).repeat_interleave(rows["tokens"].shape[1])[None]
    logits, _ = ours.forward(packed)
    assert (logits.view_as(wanted) - wanted).abs().max() <= 1e-5 * max(1, wanted.abs().max())
    logits.logsumexp(-1).sum().backward()
    gradients = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
    largest = max(float(each.abs().max()) for each in gradients.values())
    for key, parameter in ours.module.named_parameters():
        stored = ours.hf_parameter(key)
        gradient = gradients[stored.name]
        gradient = stored.taken_from(gradient) if stored.parts > 1 else gradient.view(parameter.shape)
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5 * largest, rtol=1e-3, msg=key)


def test_transformers_reads_what_we_write(theirs: tuple[str, PreTrainedModel, Path], tmp_path: Path) -> None:
    name, _, folder = theirs
    spec = read_spec(folder)
    ours = network_of(spec)
    initialise(ours.module, seed=3, spec=spec)
    perturb(ours.module)
    out = tmp_path / "written"
    out.mkdir()
    save_file(dict(ours.disk_tensors()), out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(ours.disk_config()))
    model, report = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    unread = {each for each in report["missing_keys"] if "post_layernorm" not in each}  # LLaVA does not use it
    assert not any([unread, report["unexpected_keys"], report["mismatched_keys"]])
    images = random_images(SHAPES.get(name, VARIOUS))
    inputs = inputs_of(spec, images, [[0, None, 1], [None, 2, None]])
    their = hf_inputs(spec, inputs, images)
    with torch.no_grad():
        wanted = model.eval()(**their).logits
        logits, _ = ours.forward(inputs | hf_positions(model, their))
    assert (logits - wanted).abs().max() <= 1e-5 * max(1, wanted.abs().max()), (logits - wanted).abs().max()
    again = network_of(read_spec(out))
    again.load(out)
    for (key, one), other in zip(again.module.named_parameters(), ours.module.parameters(), strict=True):
        assert torch.equal(one, other), key


@pytest.mark.parametrize("width", [16, 24])  # with 16, gate_up_proj is square
def test_experts_are_read_transposed_and_as_they_are(width: int, tmp_path: Path) -> None:
    config = deepcopy(CONFIGS["qwen3-vl-moe"])
    config.text_config.moe_intermediate_size = width
    model = AutoModelForImageTextToText.from_config(config)
    perturb(model)
    model.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    wanted = {name: each.detach() for name, each in model.named_parameters()}

    def assert_read() -> None:
        ours = network_of(spec)
        ours.load(tmp_path)
        for name, parameter in ours.module.named_parameters():
            stored = ours.hf_parameter(name)
            assert torch.equal(parameter, stored.taken_from(wanted[stored.name]).view_as(parameter)), name

    assert_read()
    tensors = load_file(tmp_path / "model.safetensors")
    stacked = {name: each for name, each in tensors.items() if ".experts." in name and each.shape[1] != each.shape[2]}
    assert len(stacked) == (6 if width == 24 else 3)
    turned = {name: each.transpose(1, 2).contiguous() for name, each in stacked.items()}
    save_file(tensors | turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_read()


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


def test_weights_of_another_model_are_refused_before_any_value_is_written(tmp_path: Path) -> None:
    module = initialised(NATIVE)
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
    assert "wrong shape: visual.merger.mlp.0.bias [3] (the model has [64])" in caught.value.what
    assert "unexpected: visual.stranger" in caught.value.what
    assert all(torch.equal(one, other) for one, other in zip(before, fresh.parameters(), strict=True))


def test_stages_write_the_tensors_of_the_full_model_and_read_back_their_own(spec: VlmSpec, tmp_path: Path) -> None:
    full = dict(vlm_tensors(initialised(spec)))
    for counts in STAGE_SPLITS:
        stages = [range(start, stop) for start, stop in pairwise([0, *accumulate(counts)])]
        parts = [dict(vlm_tensors(initialised(spec, blocks))) for blocks in stages]
        assert [name for part in parts for name in part] == list(full)
    write(tmp_path, spec, full)
    for blocks in (range(2), range(2, 5), range(5, 6)):
        stage, wanted = Vlm(spec, blocks), initialised(spec, blocks)
        load_vlm_weights(stage, tmp_path)
        for (name, ours), theirs in zip(stage.named_parameters(), wanted.parameters(), strict=True):
            assert torch.equal(ours, theirs), name


def test_initial_weights_depend_on_the_name_and_not_on_the_stage_or_the_order(spec: VlmSpec) -> None:
    full = dict(initialised(spec).named_parameters())
    for blocks in (range(1), range(1, 4), range(4, 6)):
        for name, parameter in initialised(spec, blocks).named_parameters():
            assert torch.equal(parameter, full[name]), name
    down = full["vision.layers.0.mlp.down_proj.weight"].std().item()
    assert down == pytest.approx(1 / (spec.vision.ffn * 2 * spec.vision.layers) ** 0.5, rel=0.1)
    language_down = full["language.layers.0.mlp.down_proj.weight"].std().item()
    assert language_down == pytest.approx(0.02 / (2 * spec.language.layers) ** 0.5, rel=0.1)


def halves(spec: VlmSpec, mesh: DeviceMesh) -> Vlm:
    """Return a model sharded over two ranks: rows of each weight, and columns of output projections."""
    module = Vlm(spec)
    for name, owner in module.named_modules():
        for leaf, parameter in list(owner.named_parameters(recurse=False)):
            across = parameter.ndim > 1 and name.endswith(("o_proj", "down_proj", "linear_2"))
            shard = distribute_tensor(torch.empty_like(parameter), mesh, [Shard(1 if across else 0)])
            owner.register_parameter(leaf, nn.Parameter(shard))
    module._apply(lambda x: x)  # ties the tied weights again
    return module


def fill_halves(folder: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for name in SPREAD:
        spec = SPECS[name]
        wanted = dict(initialised(spec).named_parameters())
        split = halves(spec, mesh)
        initialise(split, seed=5, spec=spec)
        for key, parameter in split.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), wanted[key]), key
        read = halves(spec, mesh)
        load_vlm_weights(read, folder / name)
        written = dict(vlm_tensors(read))
        on_disk = load_file(folder / name / "model.safetensors")
        assert written.keys() == on_disk.keys()
        assert all(torch.equal(written[key], on_disk[key]) for key in on_disk)
    dist.destroy_process_group()


def test_values_do_not_depend_on_the_sharding(tmp_path: Path) -> None:
    for name in SPREAD:
        spec = SPECS[name]
        (tmp_path / name).mkdir()
        module = initialised(spec)
        perturb(module)
        write(tmp_path / name, spec, {key: value.clone() for key, value in vlm_tensors(module)})
    run_ranks(2, fill_halves, tmp_path)
