"""Which Hugging Face models are cut into pipeline stages, what a stage holds, and why others are refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.hf_pipeline_models import config_of, save_config
from trimaran.core import UserError
from trimaran.models import refuse_ep_degree
from trimaran.nets import (
    HfNetwork,
    count_experts,
    cut_stage,
    hf_network,
    open_hf_model,
    pipeline_layers,
    spreadable_experts,
)

TOKENS = torch.arange(16).view(2, 8)


def network_of(name: str, folder: Path, **changes: Any) -> HfNetwork:
    module, _ = open_hf_model(save_config(name, folder, **changes), trust_remote_code=False, seed=0)
    return hf_network(module.train(), None)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "opt", "falcon", "bloom", "gemma2", "qwen3-moe"])
def test_stages_hold_every_parameter_once_and_compute_what_the_model_does(name: str, tmp_path: Path) -> None:
    module, fill = open_hf_model(save_config(name, tmp_path), trust_remote_code=False, seed=0)
    whole = hf_network(module.eval(), None)
    fill(module, torch.device("cpu"))
    layers = pipeline_layers(whole)
    stages = [cut_stage(whole, layers, part) for part in (range(1), range(1, 3), range(3, 4))]
    held = [{key for key, _ in stage.module.named_parameters()} for stage in stages]
    tied = {f"{layers.tied}.weight"} if layers.tied else set()
    assert set.union(*held) == {key for key, _ in whole.module.named_parameters()}
    assert held[0] & held[2] == tied
    assert not held[1] & (held[0] | held[2])
    assert [len(stage.blocks) for stage in stages] == [1, 2, 1]
    stream: tuple[torch.Tensor, ...] = ()
    for stage in stages:
        stream = (stage.forward({"tokens": TOKENS}, *stream)[0],)
    assert torch.equal(stream[0], whole.forward({"tokens": TOKENS})[0])


def test_layers_that_are_skipped_at_random_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"M069.*skips layers of model.decoder.layers at random"):
        pipeline_layers(network_of("opt", tmp_path, layerdrop=0.1))


class Backwards(nn.ModuleList):
    """A list that runs from its end to its beginning."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([*self._modules.values()][::-1])  # pyrefly: ignore[bad-return]


def broken(network: HfNetwork, kind: str) -> None:
    """Change a Llama so that it is no longer a plain chain of layers."""
    model: Any = network.module.model
    if kind == "shared":
        model.layers[2].mlp = model.layers[0].mlp
    elif kind == "order":
        model.layers = Backwards([*model.layers])
    elif kind == "outputs":
        kept: list[Any] = []
        model.layers[0].register_forward_hook(lambda part, args, out: kept.append(out))
        model.norm.register_forward_pre_hook(lambda part, args: (args[0] + kept.pop(),))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("shared", "layers share weights or values"),
        ("order", "in another order"),
        ("outputs", "more than the last layer's result"),
    ],
)
def test_a_model_that_is_no_chain_of_layers_is_refused(kind: str, reason: str, tmp_path: Path) -> None:
    network = network_of("llama", tmp_path)
    broken(network, kind)
    with pytest.raises(UserError, match=f"M069.*model.layers.*{reason}|M069.*{reason}"):
        pipeline_layers(network)


def test_only_stacked_experts_are_spread(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"M070.*no stacked experts"):
        spreadable_experts(network_of("llama", tmp_path / "dense").module)
    module = network_of("mixtral", tmp_path / "mixture").module
    assert len(spreadable_experts(module)) == config_of("mixtral").num_hidden_layers
    assert count_experts(module) == 4
    with pytest.raises(UserError, match=r"P010.*ep 3 does not divide the 4 experts"):
        refuse_ep_degree(3, 1, 4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bloom"])
def test_the_stream_has_the_dtype_in_which_stages_send_it(name: str, tmp_path: Path) -> None:
    module, fill = open_hf_model(save_config(name, tmp_path), trust_remote_code=False, seed=0)
    network, seen = hf_network(module.train(), None), set()
    fill(module, torch.device("cpu"))
    for block in network.blocks:
        block.register_forward_pre_hook(
            lambda _, args, kwargs: seen.add((args[0] if args else kwargs["hidden_states"]).dtype), with_kwargs=True
        )
    with torch.autocast("cpu", torch.bfloat16):
        network.forward({"tokens": TOKENS})
    assert seen == {torch.bfloat16}
