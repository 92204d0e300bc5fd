"""A checkpoint of an adapter is exported as PEFT's folder or merged into whole weights, with equal logits."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.cases import slow
from tests.hf_models import save_model
from tests.unit.test_checkpoint_export import save
from tests.unit.test_peft_format import TOKENS, logits, open_network, peft_model, section_of
from tests.vlm_models import CONFIGS as VLM_CONFIGS
from trimaran.checkpoint import (
    DcpSource,
    DiskSource,
    export_adapter,
    export_dcp,
    export_merged,
    find_imported_tensors,
    read_full_tensor,
)
from trimaran.core import ModelSection, Recipe, UserError
from trimaran.nets import Network, adapter_parameters, open_base_weights
from trimaran.serve import base_of_peft, fill_from_peft, load_adapted, section_of_folder
from trimaran.train import load_trained

CPU = torch.device("cpu")


def checkpoint_of(network: Network, folder: Path) -> DiskSource:
    """Return a checkpoint with what a run would save of this network: what is trained."""
    return save(folder, {f"model/{name}": each.detach() for name, each in adapter_parameters(network.module)})


def export(what: Callable[..., None], source: DiskSource, section: ModelSection, folder: Path, **rest: Any) -> Path:
    what(source, section, folder, add_files=lambda draft: None, progress=lambda what, fraction: None, **rest)
    return folder


def rounded(model: Path) -> Path:
    """Store the weights of a model in bf16."""
    file = model / "model.safetensors"
    save_file({name: each.bfloat16() for name, each in load_file(file).items()}, file, metadata={"format": "pt"})
    return model


CASES: list[Any] = [
    ("qwen2", "decoder", {"train": ("lm_head",)}),
    slow(("qwen2", "hf", {"kind": "dora"})),
    slow(("qwen2", "decoder", {"kind": "dora"})),
    slow(("llama-odd", "decoder", {"train": ("embed_tokens",)})),
    slow(("llama-tied", "hf", {"rank_stabilised": True})),
    slow(("qwen3-moe", "decoder", {})),
    slow(("qwen3-moe", "hf", {})),
    slow(("phi3", "hf", {})),
    slow(("gemma3", "hf", {"targets": ("q_proj", "down_proj")})),
]


@pytest.mark.parametrize(("name", "family", "adapter"), CASES)
def test_both_exports_compute_what_the_run_computed(
    tmp_path: Path, name: str, family: str, adapter: dict[str, Any]
) -> None:
    section = section_of(save_model(name, tmp_path / "base"), family, **adapter)
    network = open_network(section)
    source = checkpoint_of(network, tmp_path / "checkpoints")
    merged = export(export_merged, source, section, tmp_path / "merged", seed=0, dtype=None)
    whole = AutoModelForCausalLM.from_pretrained(merged, dtype="auto")
    assert whole.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(whole(input_ids=TOKENS).logits, logits(network), atol=5e-6, rtol=1e-5)
    folder = export(export_adapter, source, section, tmp_path / "adapter", dtype="fp32")
    base = AutoModelForCausalLM.from_pretrained(section.path, dtype=torch.float32)
    with torch.no_grad():
        theirs = peft_model(base, folder)(input_ids=TOKENS).logits
    torch.testing.assert_close(theirs, logits(network), atol=5e-6, rtol=1e-5)
    again = load_adapted(section, CPU, fill_from_peft(folder))
    torch.testing.assert_close(logits(again), logits(network), atol=5e-6, rtol=1e-5)


def test_a_merged_weight_is_rounded_once_to_the_dtype_of_the_base(tmp_path: Path) -> None:
    section = section_of(rounded(save_model("qwen2", tmp_path / "base")))
    network = open_network(section)
    source = checkpoint_of(network, tmp_path / "checkpoints")
    merged = load_file(export(export_merged, source, section, tmp_path / "m", seed=0, dtype=None) / "model.safetensors")
    exact = load_file(
        export(export_merged, source, section, tmp_path / "x", seed=0, dtype="fp32") / "model.safetensors"
    )
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert {each.dtype for each in merged.values()} == {torch.bfloat16}
    assert {each.dtype for each in exact.values()} == {torch.float32}
    for name, each in merged.items():
        assert torch.equal(each, exact[name].bfloat16()), name
        assert torch.equal(each, base[name]) == ("proj" not in name or "bias" in name), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-vl", "llava"])
@pytest.mark.parametrize("family", ["vlm", "hf"])
def test_the_towers_of_a_vlm_are_merged(tmp_path: Path, name: str, family: str) -> None:
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(VLM_CONFIGS[name]).save_pretrained(tmp_path / "base")
    towers = ("vision", "language") if family == "vlm" or name == "qwen2-vl" else ("language",)
    section = section_of(tmp_path / "base", family, towers=towers, train=("projector",))
    network = open_network(section)
    source = checkpoint_of(network, tmp_path / "checkpoints")
    merged = export(export_merged, source, section, tmp_path / "merged", seed=0, dtype=None)
    folder = export(export_adapter, source, section, tmp_path / "adapter", dtype="fp32")
    kind = AutoModelForImageTextToText
    peft = peft_model(kind.from_pretrained(section.path, dtype=torch.float32), folder)
    theirs, ours = peft.merge_and_unload().state_dict(), kind.from_pretrained(merged).state_dict()
    assert ours.keys() <= theirs.keys()  # LLaVA has layers that it does not use, and our network has none of them
    assert len(ours) == len(theirs) or (name, family) == ("llava", "vlm")
    for each, value in ours.items():
        torch.testing.assert_close(value, theirs[each], atol=1e-6, rtol=1e-5)


def test_a_peft_folder_alone_describes_its_adapter(tmp_path: Path) -> None:
    """One without a recipe: the base is the one that it names, and the layers are those of its tensors."""
    section = section_of(save_model("qwen2", tmp_path / "base"), train=("lm_head",), targets=("q_proj", "up_proj"))
    network = open_network(section)
    source = checkpoint_of(network, tmp_path / "checkpoints")
    folder = export(export_adapter, source, section, tmp_path / "adapter", dtype="fp32")
    found = section_of_folder(base_of_peft(folder))
    assert found.adapter is None
    again = load_adapted(found, CPU, fill_from_peft(folder), adapter=folder)
    torch.testing.assert_close(logits(again), logits(network), atol=5e-6, rtol=1e-5)


def test_a_base_without_weights_is_drawn_again(tmp_path: Path) -> None:
    section = section_of(tmp_path).model_copy(update={"path": None, "preset": "tiny", "shape": {"layers": 1}})
    network = open_network(section)
    source = checkpoint_of(network, tmp_path / "checkpoints")
    merged = export(export_merged, source, section, tmp_path / "merged", seed=7, dtype=None)
    torch.testing.assert_close(logits(load_trained(section, merged, CPU)), logits(network), atol=5e-6, rtol=1e-5)


def test_an_export_with_another_adapter_names_what_is_missing(tmp_path: Path) -> None:
    section = section_of(save_model("qwen2", tmp_path / "base"), targets=("q_proj",))
    source = checkpoint_of(open_network(section), tmp_path / "checkpoints")
    other = section_of(tmp_path / "base", targets=("q_proj", "v_proj"))
    for what, rest in ((export_adapter, {"dtype": "fp32"}), (export_merged, {"seed": 0, "dtype": None})):
        with pytest.raises(UserError, match=r"K025.* such as .*v_proj\.lora_A"):
            export(what, source, other, tmp_path / "out", **rest)


def test_base_weights_are_those_of_the_loaded_network(tmp_path: Path) -> None:
    section = ModelSection(path=str(save_model("qwen3-moe", tmp_path / "base")))
    network: Network = load_trained(section, tmp_path / "base", CPU)
    with ExitStack() as stack:
        base = open_base_weights(section, 0, stack)
        for name, parameter in network.module.named_parameters():
            value: Tensor = base.read(name)
            assert torch.equal(value, parameter), name


def test_the_adapter_survives_a_way_through_dcp(tmp_path: Path) -> None:
    section = section_of(save_model("qwen2", tmp_path / "base"), targets=("q_proj",), train=("norm",))
    network = open_network(section)
    state: dict[str, Tensor] = {}
    for name, each in adapter_parameters(network.module):
        moments = {"exp_avg": each.detach() + 1, "exp_avg_sq": each.detach() ** 2, "step": torch.tensor(7.0)}
        state |= {f"model/{name}": each.detach()} | {f"optimizer/{key}/{name}": value for key, value in moments.items()}
    checkpoint = save(tmp_path / "checkpoints", state)
    export_dcp(checkpoint, section, tmp_path / "dcp", progress=lambda what, fraction: None)
    source = DcpSource(tmp_path / "dcp")
    found = find_imported_tensors(source, Recipe(model=section))
    assert (found.step, found.with_moments) == (7, True)
    assert {each.key for each in found.tensors} == state.keys()
    assert all(torch.equal(read_full_tensor(source, each.keys[0]), state[each.key]) for each in found.tensors)
