"""An adapter written in PEFT's format is loaded by PEFT with equal logits, and read back unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.cases import slow
from tests.hf_models import save_model
from tests.vlm_models import CONFIGS as VLM_CONFIGS
from tests.vlm_models import SHAPES, VARIOUS, hf_inputs, hf_positions, inputs_of, random_images
from trimaran.checkpoint import AdapterFacts, whole_modules, write_peft_folder
from trimaran.core import AdapterSection, ModelSection
from trimaran.models import VlmSpec, spec_of
from trimaran.nets import (
    PEFT_CONFIG,
    Network,
    adapter_parameters,
    attach_adapter,
    initialise,
    initialise_adapter,
    load_peft_adapter,
    network_of,
    peft_tensors,
    refuse_inexpressible,
)

TOKENS = torch.arange(24).view(2, 12)
ROWS = [[None, 0, None, 1, None], [None, None, 2, None]]  # the number of an image, or text


def section_of(path: Path, family: Any = "decoder", **adapter: Any) -> ModelSection:
    section = AdapterSection.model_validate({"rank": 4, "alpha": 6.0} | adapter)
    return ModelSection(family=family, path=str(path), adapter=section)


def open_network(section: ModelSection) -> Network:
    """Return the network with the base weights of `section`, and an adapter whose values are not the first ones."""
    assert section.adapter is not None
    if section.family == "hf":
        assert section.path is not None
        from trimaran.nets import load_hf_model, network_of_hf  # noqa: PLC0415  they import transformers

        module = load_hf_model(Path(section.path), trust_remote_code=False, seed=0)
        network = network_of_hf(module, spec_of(section))
    else:
        spec = spec_of(section)
        assert spec is not None
        network = network_of(spec)
        network.load(Path(section.path)) if section.path else initialise(network.module, seed=7, spec=spec)
    refuse_inexpressible(network, section.adapter)
    attach_adapter(network, section.adapter)
    initialise_adapter(network.module, seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameter in adapter_parameters(network.module):
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    network.module.eval()
    return network


def write(network: Network, section: ModelSection, folder: Path) -> Path:
    facts = AdapterFacts(section=section, base={}, modules=whole_modules(section, network))
    with torch.no_grad():
        write_peft_folder(folder, facts, peft_tensors(network), add_files=lambda folder: None)
    return folder


def peft_model(base: Any, folder: Path) -> Any:
    """Return a model of transformers with an adapter, as PEFT reads it."""
    from peft import PeftModel  # noqa: PLC0415  it takes seconds to import

    return PeftModel.from_pretrained(base, folder).eval()


def assert_peft_agrees(section: ModelSection, folder: Path, ours: Tensor, kind: Any = AutoModelForCausalLM) -> Any:
    base = kind.from_pretrained(section.path, dtype=torch.float32)
    plain = base(input_ids=TOKENS).logits
    model = peft_model(base, folder)
    with torch.no_grad():
        theirs = model(input_ids=TOKENS).logits
    assert (plain - ours).abs().max() > 0.01, "the adapter changes the logits"
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
    return model


def logits(network: Network) -> Tensor:
    with torch.no_grad():
        return network.forward({"tokens": TOKENS})[0]


KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"kind": "dora"},
    "rslora": {"rank_stabilised": True, "targets": ("q_proj", "layers.1.mlp.down_proj")},
    "head": {"train": ("lm_head", "norm")},
}


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("decoder", "lora"),
        ("decoder", "head"),
        ("hf", "dora"),
        *(slow(case) for case in (("decoder", "dora"), ("decoder", "rslora"), ("hf", "lora"), ("hf", "rslora"))),
        slow(("hf", "head")),
    ],
)
def test_peft_loads_what_we_write(tmp_path: Path, family: str, kind: str) -> None:
    model = save_model("qwen2", tmp_path / "base")
    targets = KINDS[kind].get("targets")
    if family == "hf" and targets:
        targets = tuple(f"model.{each}" if "." in each else each for each in targets)
    section = section_of(model, family, **KINDS[kind] | ({"targets": targets} if targets else {}))
    network = open_network(section)
    folder = write(network, section, tmp_path / "adapter")
    assert_peft_agrees(section, folder, logits(network))
    again = open_network(section)
    load_peft_adapter(again, folder, section.adapter)  # pyrefly: ignore[bad-argument-type]
    assert torch.equal(logits(again), logits(network))


def test_peft_reads_a_tied_embedding_that_is_trained(tmp_path: Path) -> None:
    section = section_of(save_model("llama-odd", tmp_path / "base"), train=("embed_tokens",))
    network = open_network(section)
    folder = write(network, section, tmp_path / "adapter")
    config = json.loads((folder / PEFT_CONFIG).read_text())
    assert config["modules_to_save"] == ["lm_head", "model.embed_tokens"]
    assert_peft_agrees(section, folder, logits(network))


VLM_KINDS: dict[str, dict[str, Any]] = {
    "language": {},
    "vision": {"towers": ("vision",), "train": ("projector",)},
    "all": {"towers": ("vision", "projector", "language"), "rank_stabilised": True},
    "some": {"towers": ("vision",), "targets": ("q_proj", "v_proj")},
    "dora": {"kind": "dora", "towers": ("vision", "language")},
}


@pytest.mark.parametrize(
    ("name", "family", "kind"),
    [
        ("qwen2-vl", "vlm", "some"),
        ("qwen2-vl", "vlm", "dora"),
        *(slow(("qwen2-vl", "vlm", kind)) for kind in ("language", "vision", "all")),
        *(slow(("llava", "vlm", kind)) for kind in ("all", "language")),
        slow(("qwen2.5-vl", "vlm", "dora")),
        slow(("qwen2-vl", "hf", "all")),
    ],
)
def test_peft_loads_the_adapters_of_towers(tmp_path: Path, name: str, family: str, kind: str) -> None:
    torch.manual_seed(0)
    base = AutoModelForImageTextToText.from_config(VLM_CONFIGS[name])
    base.save_pretrained(tmp_path / "base")
    section = section_of(tmp_path / "base", family, **VLM_KINDS[kind])
    spec = spec_of(section)
    assert isinstance(spec, VlmSpec)
    network = open_network(section)
    folder = write(network, section, tmp_path / "adapter")
    images = random_images(SHAPES.get(name, VARIOUS))
    inputs = inputs_of(spec, images, ROWS)
    their = hf_inputs(spec, inputs, images)
    with torch.no_grad():
        ours = network.forward(inputs | hf_positions(base, their))[0]
        untrained = base.eval()(**their).logits
        theirs = peft_model(base, folder)(**their).logits
    assert (untrained - ours).abs().max() > 0.001
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    again = open_network(section)
    load_peft_adapter(again, folder, section.adapter)  # pyrefly: ignore[bad-argument-type]
    for (name_, one), (_, other) in zip(
        network.module.named_parameters(), again.module.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name_
