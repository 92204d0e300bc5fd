"""LoRA and DoRA layers, and attaching them to networks."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from trimaran.core import AdapterSection, ModelSection, Plan, UserError
from trimaran.models import PRESETS, VLM_PRESETS, linear_names, linear_sizes, refuse_adapter
from trimaran.nets import (
    LoraLinear,
    Network,
    adapter_parameters,
    add_adapter,
    attach_adapter,
    initialise,
    initialise_adapter,
    is_adapter_parameter,
    merged_weight,
    network_of,
    rotation_at,
)
from trimaran.parallel import matrix_rank, override_precision, selective_policy, store_frozen_weights

SPEC = replace(PRESETS["tiny"], layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48)
MIXTURE = replace(PRESETS["tiny-moe"], layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8)
VLM = VLM_PRESETS["tiny"]
CPU = torch.device("cpu")
CONTEXT = SelectiveCheckpointContext(is_recompute=False)


def section_of(**fields: Any) -> AdapterSection:
    return AdapterSection.model_validate({"rank": 4} | fields)


def layer_of(*, bias: bool = False, **fields: Any) -> LoraLinear:
    torch.manual_seed(0)
    layer = nn.Linear(12, 20, bias=bias)
    layer.requires_grad_(False)
    add_adapter(layer, section_of(**fields))
    assert isinstance(layer, LoraLinear)
    initialise_adapter(layer, seed=1)
    with torch.no_grad():
        layer.lora_B.normal_()
        if layer.lora_magnitude is not None:
            layer.lora_magnitude.mul_(1.5)
    return layer


def attached(spec: Any = SPEC, **fields: Any) -> Network:
    network = network_of(spec)
    initialise(network.module, seed=1, spec=spec)
    attach_adapter(network, section_of(**fields))
    initialise_adapter(network.module, seed=1)
    return network


def targets_of(network: Network) -> set[str]:
    return {name for name, each in network.module.named_modules() if isinstance(each, LoraLinear)}


def trained(network: Network) -> set[str]:
    return {name for name, _ in adapter_parameters(network.module)}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_output_is_that_of_the_merged_weight(kind: str, bias: bool) -> None:
    layer = layer_of(kind=kind, bias=bias, alpha=3.0)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(layer(x), F.linear(x, merged_weight(layer), layer.bias))
    assert not torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias))


def test_rank_stabilised_scaling_divides_by_the_root_of_the_rank() -> None:
    assert layer_of(alpha=8.0).scaling == 2.0
    assert layer_of(alpha=8.0, rank_stabilised=True).scaling == 4.0


class CountMatmuls(TorchDispatchMode):
    """Counts matmuls."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_backward_computes_no_gradient_of_the_frozen_weight() -> None:
    layer, x = layer_of(), torch.randn(3, 12, requires_grad=True)
    out = layer(x)
    with CountMatmuls() as backward:
        out.sum().backward()
    assert backward.count == 5, "of x through the weight, of lora_B, of its input, of lora_A, and of x through it"
    assert layer.weight.grad is None


def test_only_a_dropped_input_of_the_adapter_changes_the_output() -> None:
    layer = layer_of(dropout=0.5)
    x = torch.randn(3, 12)
    base = F.linear(x, layer.weight)
    seen = {layer(x).sub(base).abs().sum().item() for _ in range(4)}
    assert len(seen) > 1
    layer.eval()
    torch.testing.assert_close(layer(x), F.linear(x, merged_weight(layer)))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_new_adapter_changes_nothing(kind: str) -> None:
    plain, network, tokens = network_of(SPEC), attached(kind=kind), torch.arange(16).view(2, 8)
    initialise(plain.module, seed=1, spec=SPEC)
    torch.testing.assert_close(network.forward({"tokens": tokens})[0], plain.forward({"tokens": tokens})[0])


def test_the_first_values_depend_on_the_seed_and_the_name_only() -> None:
    some, more = attached(targets=["q_proj"]), attached(train=["lm_head"])
    name = "layers.1.self_attn.q_proj.lora_A"
    first = some.module.get_parameter(name)
    assert torch.equal(first, more.module.get_parameter(name))
    assert not torch.equal(first, some.module.get_parameter(name.replace("1", "0")))
    bound = 32**-0.5
    assert bound * 0.8 < first.abs().max() <= bound


def test_names_of_the_base_do_not_change() -> None:
    plain, network = network_of(SPEC), attached(kind="dora")
    names = [name for name, _ in network.module.named_parameters() if not is_adapter_parameter(name)]
    assert names == [name for name, _ in plain.module.named_parameters()]
    assert network.module.get_parameter("layers.0.mlp.up_proj.lora_magnitude").shape == (48,)


def test_all_linear_layers_but_the_head_get_an_adapter() -> None:
    network = attached(replace(SPEC, tied=False))
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    parts += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert targets_of(network) == {f"layers.{number}.{part}" for number in range(2) for part in parts}
    assert trained(network) == {f"{name}.{part}" for name in targets_of(network) for part in ("lora_A", "lora_B")}


def test_routers_and_experts_get_no_adapter() -> None:
    for name in targets_of(attached(MIXTURE)):
        assert "self_attn" in name or "shared_expert." in name


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("q_proj", {"layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"}),
        ("layers.1.*.?_proj", {f"layers.1.self_attn.{part}_proj" for part in "qkvo"}),
        ("up*", {"layers.0.mlp.up_proj", "layers.1.mlp.up_proj"}),
    ],
)
def test_a_target_is_the_last_part_of_a_name_or_a_pattern_of_the_whole(pattern: str, expected: set[str]) -> None:
    assert targets_of(attached(targets=[pattern])) == expected


def test_other_towers_are_frozen_unless_they_are_named() -> None:
    language = attached(VLM)
    assert {name.split(".")[0] for name in trained(language)} == {"language"}
    both = attached(VLM, towers=["vision", "language"], train=["projector"])
    assert {name.split(".")[0] for name in trained(both)} == {"vision", "projector", "language"}
    assert "vision.layers.0.self_attn.q_proj.lora_A" in trained(both)
    assert "projector.linear_1.weight" in trained(both)
    assert not any("patch_embed" in name for name in targets_of(both))


def test_a_module_that_is_trained_in_full_gets_no_adapter() -> None:
    network = attached(train=["layers.0.mlp"])
    assert "layers.0.mlp.up_proj" not in targets_of(network)
    assert "layers.0.mlp.up_proj.weight" in trained(network)


def test_a_stage_trains_its_copy_of_a_tied_embedding() -> None:
    spec = replace(SPEC, tied=True)
    section, whole = section_of(train=["lm_head"]), network_of(spec)
    for layers in (range(1), range(1, 2)):
        stage = network_of(spec, layers)
        attach_adapter(stage, section, whole)
        assert stage.module.get_parameter("embed_tokens.weight").requires_grad


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"targets": ["q_prj"]}, "M054", "did you mean 'q_proj'"),
        ({"targets": ["gate"]}, "M054", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ({"targets": []}, "M054", "no targets"),
        ({"train": ["projecter"]}, "M051", "no module with parameters is called 'projecter'"),
        ({"rank": 33}, "M052", "at most 16"),
        ({"targets": ["lm_head"]}, "M053", "tied"),
        ({"towers": ["visoin"]}, "M012", "language"),
    ],
)
def test_a_section_that_does_not_fit_the_network_is_refused(fields: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        attached(replace(SPEC, tied=True), **fields)
    assert error.value.code == code
    assert words in f"{error.value.what} {error.value.fix}"


@pytest.mark.parametrize(
    ("fields", "plan", "code"),
    [
        ({"family": "perception"}, Plan(), "M055"),
        ({"freeze": ["language"]}, Plan(), "M056"),
        ({"family": "vlm", "freeze": ["projector"], "adapter": {"train": ["projector"]}}, Plan(), "M056"),
        ({}, Plan(engine="deepspeed"), "P064"),
    ],
)
def test_an_adapter_that_contradicts_the_recipe_is_refused(fields: dict[str, Any], plan: Plan, code: str) -> None:
    section = ModelSection.model_validate({"adapter": {}} | fields)
    with pytest.raises(UserError) as error:
        refuse_adapter(section, plan)
    assert error.value.code == code


@pytest.mark.parametrize("spec", [SPEC, MIXTURE, VLM])
def test_a_plan_knows_the_linear_layers_of_our_networks(spec: Any) -> None:
    network = network_of(spec)
    towers = list(network.towers)
    adapted = targets_of(attached(spec, rank=1, towers=towers)) | {
        name for name in linear_names(spec) if "head" in name
    }
    assert adapted == set(linear_names(spec))
    section = ModelSection(family="vlm" if spec is VLM else "decoder", adapter=section_of(targets=["q_prj"]))
    with pytest.raises(UserError, match="did you mean 'q_proj'"):
        refuse_adapter(section, Plan(), spec)


@pytest.mark.parametrize("spec", [SPEC, MIXTURE, VLM])
def test_a_plan_knows_the_sizes_of_linear_layers_and_refuses_a_larger_rank(spec: Any) -> None:
    network, family = network_of(spec), "vlm" if spec is VLM else "decoder"
    linears = {name: each for name, each in network.module.named_modules() if isinstance(each, nn.Linear)}
    sizes = {name: (linears[name].in_features, linears[name].out_features) for name in linear_names(spec)}
    assert linear_sizes(spec) == sizes
    towers = list(network.towers)
    smallest = min(min(each) for name, each in sizes.items() if not name.endswith("lm_head"))
    refuse_adapter(ModelSection(family=family, adapter=section_of(rank=smallest, towers=towers)), Plan(), spec)
    section = ModelSection(family=family, adapter=section_of(rank=smallest + 1, towers=towers))
    with pytest.raises(UserError, match=f"the rank is {smallest + 1}, and ") as error:
        refuse_adapter(section, Plan(), spec)
    assert error.value.code == "M052"
    refuse_adapter(section.model_copy(update={"family": "hf"}), Plan(), spec)  # its projections may be joint
    too_small = [name for name, each in sizes.items() if min(each) == smallest]
    others = section_of(rank=smallest + 1, towers=towers, train=too_small)  # trained in full, so without an adapter
    refuse_adapter(ModelSection(family=family, adapter=others), Plan(), spec)


def test_frozen_weights_are_stored_in_the_dtype_that_they_are_computed_in() -> None:
    network = attached(MIXTURE, train=["norm"])
    exact = {name: each.clone() for name, each in network.module.named_parameters()}
    override_precision(network, {"layers.1.self_attn": "fp32"}, CPU)
    network.module._keep_in_fp32_modules = ["post_attention_layernorm"]  # pyrefly: ignore
    store_frozen_weights(network, Plan(precision="bf16"))
    dtypes = {name: each.dtype for name, each in network.module.named_parameters()}
    assert dtypes["layers.0.self_attn.q_proj.weight"] == torch.bfloat16
    assert dtypes["layers.0.input_layernorm.weight"] == torch.bfloat16
    assert dtypes["layers.0.post_attention_layernorm.weight"] == torch.float32
    assert dtypes["layers.1.self_attn.q_proj.weight"] == torch.float32
    assert dtypes["layers.0.mlp.gate.weight"] == torch.float32, "a router computes in fp32"
    assert all(each.dtype == torch.float32 for _, each in adapter_parameters(network.module))
    for name, each in network.module.named_parameters():
        assert torch.equal(each, exact[name].to(each.dtype)), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_compiled_block_has_no_graph_break(kind: str) -> None:
    network = attached(kind=kind, dropout=0.1)
    block, tokens = network.blocks[0], torch.arange(16).view(2, 8)
    rotation = rotation_at(torch.arange(8)[None], SPEC.block.rope, SPEC.head_dim)
    explained = torch._dynamo.explain(block)(torch.randn(*tokens.shape, SPEC.hidden), rotation, None)
    assert explained.graph_break_count == 0, explained.break_reasons


@pytest.mark.parametrize("targets", [["q_proj"], "all-linear"])
def test_selective_recompute_saves_the_same_matmuls_with_and_without_adapters(targets: Any) -> None:
    """The two matmuls of an adapter are recomputed, whatever its targets."""
    plain, adapted = network_of(SPEC), attached(targets=targets)
    saved = [saved_by_recompute(each) for each in (plain, adapted)]
    assert saved[0] == saved[1]
    assert (16, SPEC.kv_heads * SPEC.head_dim) in saved[0]


def saved_by_recompute(network: Network) -> list[tuple[int, ...]]:
    """Return the shapes of the matmuls whose outputs the policy of selective recompute saves, in order."""
    initialise(network.module, seed=1, spec=SPEC)
    initialise_adapter(network.module, seed=1)
    block, saved = network.blocks[0], []
    policy = partial(selective_policy, {False: 0, True: 0}, matrix_rank(block), 2)
    rotation = rotation_at(torch.arange(8)[None], SPEC.block.rope, SPEC.head_dim)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if policy(CONTEXT, func, *args) == CheckpointPolicy.MUST_SAVE and func is torch.ops.aten.mm.default:
                saved.append(tuple(out.shape))
            return out

    with Watch():
        block(torch.randn(2, 8, SPEC.hidden), rotation, None)
    return saved
