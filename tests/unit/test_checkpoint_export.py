"""Exports to Hugging Face and DCP folders, and imports from DCP, change no bit."""

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from tests.checkpoints import UnsyncedDisk, copy_share, on_ranks, rows_of
from tests.hf_models import save_model
from tests.ranks import run_ranks
from trimaran.checkpoint import (
    DcpSource,
    DiskSource,
    Manifest,
    commit,
    draft_path,
    export_dcp,
    export_hf,
    find_imported_tensors,
    read_full_tensor,
    step_path,
    verify,
    write_hf_folder,
    write_imported_tensors,
    write_share,
)
from trimaran.core import ModelSection, Recipe, UserError, parse_recipe
from trimaran.models import ModelSpec, model_folder, spec_of
from trimaran.nets import Network, decoder_network, initialise, load_hf_weights
from trimaran.parallel import CheckpointSource

MODELS = {
    "untied": "{preset: tiny, shape: {layers: 2, tied: false}}",
    "tied": "{preset: tiny, shape: {layers: 2, tied: true}}",
    "experts": "{preset: tiny-moe, shape: {layers: 2}}",
}
TOKENS = torch.arange(24).view(2, 12)


def recipe_of(model: str, *settings: str) -> Recipe:
    return parse_recipe(f"model: {model}", name="test", overrides=settings)


def network_of(recipe: Recipe) -> Network:
    spec = spec_of(recipe.model)
    assert isinstance(spec, ModelSpec)
    network = decoder_network(spec)
    initialise(network.module, seed=3, spec=spec)
    return network


def state_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the state that a run would save: a module, and AdamW states after seven steps."""
    state = {f"model/{name}": each.detach().clone() for name, each in module.named_parameters()}
    draw = torch.Generator().manual_seed(4)
    for name, each in module.named_parameters():
        state[f"optimizer/exp_avg/{name}"] = torch.randn(each.shape, generator=draw)
        state[f"optimizer/exp_avg_sq/{name}"] = torch.rand(each.shape, generator=draw)
        state[f"optimizer/step/{name}"] = torch.tensor(7.0)
    return state


def save(folder: Path, tensors: dict[str, Tensor], *, step: int = 7, world_size: int = 2) -> DiskSource:
    """Write the tensors as ranks that hold some rows each, and return the checkpoint."""
    shares = on_ranks(world_size, lambda rank, gather: copy_share(
        rows_of(tensors, rank, world_size), rank, world_size, gather))  # fmt: skip
    draft, disk = draft_path(folder, step, "abc123"), UnsyncedDisk()
    reports = [
        write_share(draft, rank, share, memory, previous=None, disk=disk) for rank, (share, memory) in enumerate(shares)
    ]
    commit(draft, step_path(folder, step), reports, Manifest(step=step, world_size=world_size), disk)
    return DiskSource(step_path(folder, step))


def no_progress(what: str, fraction: float) -> None:
    assert what
    assert 0 <= fraction <= 1


def add_nothing(folder: Path) -> None:
    assert folder.is_dir()


def assert_same(source: CheckpointSource, tensors: dict[str, Tensor]) -> None:
    assert source.index.keys() == tensors.keys()
    for key, tensor in tensors.items():
        found = read_full_tensor(source, key)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor), key


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_an_exported_decoder_is_what_the_run_itself_would_save_and_gives_the_same_logits(
    model: str, tmp_path: Path
) -> None:
    recipe = recipe_of(model)
    network = network_of(recipe)
    source = save(tmp_path / "checkpoints", state_of(network.module))
    export_hf(source, recipe.model, tmp_path / "hf", dtype="fp32", add_files=add_nothing, progress=no_progress)
    write_hf_folder(tmp_path / "own", network.disk_config(), network.disk_tensors(), origin=None, add_files=add_nothing)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "own" / name).read_bytes()
    section = ModelSection(path=str(tmp_path / "hf"))
    spec = spec_of(section)
    assert isinstance(spec, ModelSpec)
    again = decoder_network(spec)
    load_hf_weights(again.module, model_folder(str(tmp_path / "hf")))
    with torch.no_grad():
        assert torch.equal(again.forward({"tokens": TOKENS})[0], network.forward({"tokens": TOKENS})[0])


def test_a_resumed_run_replaces_its_exported_weights(tmp_path: Path) -> None:
    network = network_of(recipe_of(MODELS["tied"]))
    for replace in (False, True):
        config = network.disk_config() | {"second": replace}
        write_hf_folder(
            tmp_path / "model", config, network.disk_tensors(), origin=None, add_files=add_nothing, replace=replace
        )
    assert json.loads((tmp_path / "model" / "config.json").read_text())["second"] is True
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
    with pytest.raises(OSError, match="not empty"):
        write_hf_folder(tmp_path / "model", {}, network.disk_tensors(), origin=None, add_files=add_nothing)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["second"] is True


def test_a_large_export_has_several_files_and_an_index(tmp_path: Path) -> None:
    network = network_of(recipe_of(MODELS["untied"]))
    write_hf_folder(tmp_path / "hf", network.disk_config(), network.disk_tensors(), origin=None,
                    add_files=add_nothing, max_file_bytes=1 << 18)  # fmt: skip
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 1
    again = network_of(recipe_of(MODELS["untied"]))
    with torch.no_grad():
        for each in again.module.parameters():
            each.zero_()
    load_hf_weights(again.module, tmp_path / "hf")
    assert all(torch.equal(a, b) for a, b in zip(again.module.parameters(), network.module.parameters(), strict=True))


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "gpt2"])
def test_a_hugging_face_model_is_exported_under_its_own_names(name: str, tmp_path: Path) -> None:
    folder = save_model(name, tmp_path / "origin")
    recipe = recipe_of(f"{{family: hf, path: {folder}}}")
    module = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for each in module.parameters():
            each.mul_(1.5)
    source = save(tmp_path / "checkpoints", state_of(module))
    export_hf(source, recipe.model, tmp_path / "hf", dtype="fp32", add_files=add_nothing, progress=no_progress)
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, module(TOKENS).logits)


def test_weights_can_be_exported_in_bf16(tmp_path: Path) -> None:
    recipe = recipe_of(MODELS["tied"])
    network = network_of(recipe)
    source = save(tmp_path / "checkpoints", state_of(network.module))
    export_hf(source, recipe.model, tmp_path / "hf", dtype="bf16", add_files=add_nothing, progress=no_progress)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    exact = dict(network.disk_tensors())
    assert {name: each.bfloat16().tolist() for name, each in exact.items()} == {
        name: each.tolist() for name, each in weights.items()
    }
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_export_never_overwrites_and_leaves_no_partial_folder(tmp_path: Path) -> None:
    recipe = recipe_of(MODELS["tied"])
    source = save(tmp_path / "checkpoints", state_of(network_of(recipe).module))
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there", "link"):
        with pytest.raises(UserError, match="K024"):
            export_dcp(source, recipe.model, tmp_path / name, progress=no_progress)
        with pytest.raises(UserError, match="K024"):
            export_hf(source, recipe.model, tmp_path / name, dtype="fp32", add_files=add_nothing, progress=no_progress)

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="K026"):
        export_hf(source, recipe.model, tmp_path / "hf", dtype="fp32", add_files=full, progress=no_progress)
    with pytest.raises(UserError, match="K026"):
        export_dcp(source, recipe.model, Path("/proc/nowhere/dcp"), progress=no_progress)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoints", "link", "there"]


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path: Path) -> None:
    source = save(tmp_path / "checkpoints", state_of(network_of(recipe_of(MODELS["tied"])).module))
    with pytest.raises(UserError, match="K025"):
        export_hf(source, recipe_of("{preset: tiny, shape: {layers: 3}}").model, tmp_path / "hf", dtype="fp32",
                  add_files=add_nothing, progress=no_progress)  # fmt: skip


def imported(folder: Path, recipe: Recipe, run: Path, *, step: int = 9) -> DiskSource:
    source = DcpSource(folder)
    path = write_imported_tensors(
        find_imported_tensors(source, recipe), source, run, manifest=Manifest(step=step), progress=no_progress
    )
    assert verify(path) == []
    return DiskSource(path)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_checkpoint_goes_to_dcp_and_back(model: str, tmp_path: Path) -> None:
    recipe = recipe_of(model)
    state = state_of(network_of(recipe).module)
    export_dcp(save(tmp_path / "checkpoints", state), recipe.model, tmp_path / "dcp", progress=no_progress)
    assert find_imported_tensors(DcpSource(tmp_path / "dcp"), recipe).step == 7
    assert_same(imported(tmp_path / "dcp", recipe, tmp_path / "again"), state)


def test_eight_bit_states_go_to_dcp_and_back(tmp_path: Path) -> None:
    recipe = recipe_of(MODELS["tied"], "train.optimizer.states=8bit")
    state = state_of(network_of(recipe).module)
    name = "layers.0.mlp.up_proj.weight"
    rows, columns = state[f"model/{name}"].shape
    for moment in ("exp_avg", "exp_avg_sq"):
        state[f"optimizer/{moment}/{name}"] = torch.arange(rows * columns).view(rows, columns).to(torch.uint8)
        state[f"optimizer/{moment}_scale@128/{name}"] = torch.rand(rows, 2)
    export_dcp(save(tmp_path / "checkpoints", state), recipe.model, tmp_path / "dcp", progress=no_progress)
    assert_same(imported(tmp_path / "dcp", recipe, tmp_path / "again"), state)


def train_with_fsdp(folder: str, path: str) -> dict[str, Tensor]:
    """Train a Hugging Face Llama with torch FSDP, save it as DCP, and return the tensors by our keys.

    The folder "nested" has weights and states below other keys, "bare" the weights alone.
    """
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(TOKENS + step).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = cast(tuple[dict[str, Any], dict[str, Any]], get_state_dict(model, optimizer))
    dcp.save({"app": {"model": weights, "optim": states}}, checkpoint_id=f"{folder}/nested")
    dcp.save(weights, checkpoint_id=f"{folder}/bare")
    full_tensors = {f"model/{_ours(name)}": each.full_tensor() for name, each in weights.items()}
    for name, moments in states["state"].items():
        for state, each in moments.items():
            full = each.full_tensor() if hasattr(each, "full_tensor") else each
            full_tensors[f"optimizer/{state}/{_ours(name)}"] = full
    dist.barrier()
    return {key: each.clone() for key, each in full_tensors.items()} if dist.get_rank() == 0 else {}


def _ours(name: str) -> str:
    return name.removeprefix("model.")


def test_a_torch_fsdp_checkpoint_is_imported_bit_for_bit(tmp_path: Path) -> None:
    folder = save_model("llama", tmp_path / "origin")
    recipe = recipe_of(f"{{path: {folder}}}")
    saved = run_ranks(2, train_with_fsdp, str(tmp_path), str(folder))[0]
    found = find_imported_tensors(DcpSource(tmp_path / "nested"), recipe)
    assert (found.step, found.with_moments) == (3, True)
    assert_same(imported(tmp_path / "nested", recipe, tmp_path / "run"), saved)
    # Of weights alone, the AdamW states start as zeros.
    zeros = {key: each if key.startswith("model/") else torch.zeros_like(each) for key, each in saved.items()}
    found = find_imported_tensors(DcpSource(tmp_path / "bare"), recipe)
    assert (found.step, found.with_moments) == (0, False)
    assert_same(imported(tmp_path / "bare", recipe, tmp_path / "run-of-weights"), zeros)


def test_numbered_experts_are_stacked(tmp_path: Path) -> None:
    recipe = recipe_of(MODELS["experts"])
    network = network_of(recipe)
    dcp.save({"model": dict(network.disk_tensors())}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    state = {key: each for key, each in state_of(network.module).items() if key.startswith("model/")}
    source = imported(tmp_path / "dcp", recipe, tmp_path / "run")
    for key, tensor in state.items():
        assert torch.equal(read_full_tensor(source, key), tensor)


def test_bf16_weights_are_imported_in_fp32(tmp_path: Path) -> None:
    recipe = recipe_of(MODELS["tied"])
    weights = {name: each.detach().bfloat16() for name, each in network_of(recipe).module.named_parameters()}
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = imported(tmp_path / "dcp", recipe, tmp_path / "run")
    for name, tensor in weights.items():
        assert torch.equal(read_full_tensor(source, f"model/{name}"), tensor.float())


def test_a_dcp_of_another_model_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    recipe = recipe_of(MODELS["tied"])
    state = state_of(network_of(recipe).module)
    export_dcp(save(tmp_path / "checkpoints", state), recipe.model, tmp_path / "dcp", progress=no_progress)
    source = DcpSource(tmp_path / "dcp")
    with pytest.raises(UserError, match=r"K023.*layers\.2\."):
        find_imported_tensors(source, recipe_of("{preset: tiny, shape: {layers: 3, tied: true}}"))
    with pytest.raises(UserError, match=r"K023.*as \["):
        find_imported_tensors(source, recipe_of("{preset: tiny, shape: {layers: 2, tied: true, vocab: 300}}"))
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(UserError, match="K023"):
        find_imported_tensors(DcpSource(tmp_path / "other"), recipe_of(MODELS["tied"]))


def test_only_fp32_states_can_start_as_zeros(tmp_path: Path) -> None:
    recipe = recipe_of(MODELS["tied"], "train.optimizer.states=8bit")
    weights = dict(network_of(recipe).module.named_parameters())
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UserError, match="K027"):
        find_imported_tensors(DcpSource(tmp_path / "dcp"), recipe)


def guide_snippet() -> str:
    """Return the code of the guide that loads a DCP export."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "checkpoints.md").read_text()
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "get_state_dict(model" in each)
    return code


def stepped_optimizer(module: torch.nn.Module) -> torch.optim.AdamW:
    for each in module.parameters():
        each.grad = torch.zeros_like(each)
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("model", [MODELS["untied"], MODELS["tied"]])
def test_the_snippet_of_the_guide_moves_weights_and_states_into_a_transformers_model(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(model)
    network = network_of(recipe)
    state = state_of(network.module)
    source = save(tmp_path / "checkpoints", state)
    export_dcp(source, recipe.model, tmp_path / "dcp", progress=no_progress)
    export_hf(source, recipe.model, tmp_path / "hf", dtype="fp32", add_files=add_nothing, progress=no_progress)
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    target = AutoModelForCausalLM.from_config(config)
    optimizer = stepped_optimizer(target)
    monkeypatch.chdir(tmp_path)
    exec(guide_snippet(), {"model": target, "optimizer": optimizer})
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(*pair) for pair in zip(target.parameters(), expected.parameters(), strict=True))
    first = next(key for key in state if key.startswith("optimizer/exp_avg/") and "q_proj" in key)
    assert torch.equal(optimizer.state[target.get_parameter(f"model.{first.split('/')[2]}")]["exp_avg"], state[first])


def test_the_snippet_of_the_guide_refuses_weights_that_transformers_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(MODELS["experts"])
    source = save(tmp_path / "checkpoints", state_of(network_of(recipe).module))
    export_dcp(source, recipe.model, tmp_path / "dcp", progress=no_progress)
    export_hf(source, recipe.model, tmp_path / "hf", dtype="fp32", add_files=add_nothing, progress=no_progress)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict"):
        exec(guide_snippet(), {"model": target, "optimizer": stepped_optimizer(target)})
