"""Precision: of a plan, of single modules, and the loss scale of fp16."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trimaran.core import Plan, TrainSection, UserError
from trimaran.models import PRESETS, ModelSpec, module_names, refuse_unmatched
from trimaran.nets import Network, RMSNorm, decoder_network, initialise
from trimaran.parallel import (
    MAX_SCALE,
    LossScale,
    autocast,
    build_loss_scale,
    fsdp_modules,
    kept_weight_casts,
    override_precision,
)

CPU = torch.device("cpu")
DENSE = replace(PRESETS["tiny"], layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64, tied=False)
MIXED = replace(PRESETS["tiny-moe"], layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8)
SHARED = replace(MIXED.block.experts, shared_ffn=16, shared_gate=True)  # pyrefly: ignore
TOKENS = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(7))


def network_of(spec: ModelSpec, **patterns: str) -> Network:
    network = decoder_network(spec)
    initialise(network.module, seed=0, spec=spec)
    override_precision(network, {name.replace("__", "."): each for name, each in patterns.items()}, CPU)
    return network


def output_dtypes(network: Network, precision: str) -> dict[str, torch.dtype]:
    """Return the output dtype of each linear layer."""
    seen: dict[str, torch.dtype] = {}
    for name, each in network.module.named_modules():
        if isinstance(each, nn.Linear):
            each.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.dtype}))
    with autocast(Plan.model_validate({"precision": precision}), CPU):
        logits, _ = network.forward({"tokens": TOKENS})
    logits.float().square().mean().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in network.module.parameters())
    return seen


@pytest.mark.parametrize("spec", [DENSE, MIXED, replace(MIXED, block=replace(MIXED.block, experts=SHARED))])
def test_the_names_of_the_outline_are_those_of_the_decoder(spec: ModelSpec) -> None:
    with torch.device("meta"):
        modules = decoder_network(spec).module.named_modules()
    assert sorted(module_names(spec)) == sorted(name for name, _ in modules if name)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    refuse_unmatched(["lm_head", "layers.*.mlp.*_proj", "layers.1"], module_names(DENSE))
    for pattern, name in {"layers.*.mpl": "layers.1.mlp", "lm_heed": "lm_head", "layers.2": "layers.1"}.items():
        with pytest.raises(UserError, match="P033") as caught:
            refuse_unmatched([pattern], module_names(DENSE))
        assert caught.value.what == f"no module is called '{pattern}' (did you mean '{name}'?)"
    with pytest.raises(UserError, match="P033"):  # a star matches exactly one part of a name
        refuse_unmatched(["*.mlp"], module_names(DENSE))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_one_module_computes_in_fp32_under_any_plan(precision: str) -> None:
    seen = output_dtypes(network_of(DENSE, lm_head="fp32", layers__1__mlp="fp32"), precision)
    low = torch.float16 if precision == "fp16" else torch.bfloat16
    for name, dtype in seen.items():
        assert dtype == (torch.float32 if name == "lm_head" or name.startswith("layers.1.mlp") else low), name


def test_one_module_computes_in_low_precision_inside_an_fp32_plan() -> None:
    seen = output_dtypes(
        network_of(DENSE, **{"layers__*__mlp": "bf16", "layers__*__self_attn__o_proj": "fp16"}), "fp32"
    )
    assert seen.pop("layers.0.self_attn.o_proj") == torch.float32, "what leaves is what the surroundings can take"
    seen.pop("layers.1.self_attn.o_proj")
    assert {name for name, dtype in seen.items() if dtype == torch.bfloat16} == {
        f"layers.{layer}.mlp.{part}_proj" for layer in range(2) for part in ("gate", "up", "down")
    }


def test_low_precision_really_rounds() -> None:
    plain, rounded = network_of(DENSE), network_of(DENSE, **{"layers__*__mlp": "bf16"})
    difference = (plain.forward({"tokens": TOKENS})[0] - rounded.forward({"tokens": TOKENS})[0]).abs().max()
    assert 1e-6 < difference < 1e-2


def test_the_last_pattern_wins_and_an_inner_one_wins_inside() -> None:
    patterns = {"layers": "bf16", "layers__*": "fp16", "layers__1__mlp__up_proj": "fp32"}
    seen = output_dtypes(network_of(DENSE, **patterns), "bf16")
    assert seen.pop("lm_head") == torch.bfloat16
    assert seen.pop("layers.1.mlp.up_proj") == torch.float32
    assert set(seen.values()) == {torch.float16}


def test_names_do_not_change_and_a_copy_is_independent() -> None:
    plain, changed = network_of(DENSE).module, network_of(DENSE, lm_head="fp32").module
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in changed.named_parameters()]
    copied = copy.deepcopy(changed)
    with torch.no_grad():
        copied.get_parameter("lm_head.weight").zero_()
    assert copied(tokens=TOKENS)[0].abs().max() == 0
    assert changed(tokens=TOKENS)[0].abs().max() > 0


@pytest.mark.slow
def test_blocks_with_a_precision_override_are_one_graph() -> None:
    network = network_of(DENSE, **{"layers__*__mlp": "fp32", "layers__*__self_attn__o_proj": "fp16"})
    with autocast(Plan(precision="bf16"), CPU):
        plain, _ = network.forward({"tokens": TOKENS})
        for block in network.blocks:
            block.compile(backend="eager", fullgraph=True)
        compiled, _ = network.forward({"tokens": TOKENS})
    torch.testing.assert_close(compiled, plain)


def test_weights_are_all_gathered_in_the_dtype_of_their_module() -> None:
    network = network_of(DENSE, lm_head="fp32", layers__0="fp16", layers__1__mlp__up_proj="fp32")
    names = {id(module): name for name, module in network.module.named_modules()}
    units = [(names[id(module)], dtype) for module, dtype in fsdp_modules(network, Plan(precision="bf16"))]
    assert units == [
        ("layers.0", torch.float16),
        ("layers.1.mlp.up_proj", None),
        ("layers.1", torch.bfloat16),
        ("lm_head", None),
        ("", torch.bfloat16),
    ]


def test_a_tied_head_stays_in_the_unit_of_its_embedding() -> None:
    network = network_of(replace(DENSE, tied=True), lm_head="fp32")
    units = fsdp_modules(network, Plan(precision="bf16"))
    assert units == [(network.blocks[0], torch.bfloat16), (network.blocks[1], torch.bfloat16), (network.module, None)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_statistics_of_a_norm_are_fp32(dtype: torch.dtype) -> None:
    x = 1000 * torch.randn(4, 512, generator=torch.Generator().manual_seed(1)).to(dtype)  # squares overflow fp16
    norm = RMSNorm(512, eps=1e-5)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(norm(x), norm(x.float()).to(dtype))


class MatmulDtypes(TorchFunctionMode):
    """Records the dtype of every matmul with a weight of the given shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.seen = shape, set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is nn.functional.linear and tuple(args[1].shape) == self.shape:
            self.seen.add(out.dtype)
        return out


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("patterns", [{}, {"layers__*": "bf16"}, {"layers__*__mlp__*": "bf16"}], ids=str)
def test_the_router_is_always_fp32(precision: str, patterns: dict[str, str]) -> None:
    network = network_of(MIXED, **patterns)
    assert MIXED.block.experts is not None
    router = MatmulDtypes((MIXED.block.experts.num_experts, MIXED.hidden))
    with router, autocast(Plan.model_validate({"precision": precision}), CPU):
        network.forward({"tokens": TOKENS})
    assert router.seen == {torch.float32}


def test_the_loss_scale_halves_when_gradients_overflow_and_doubles_after_good_steps() -> None:
    scale = LossScale(initial=8.0, growth_interval=3)
    good, bad = torch.tensor(1.0), torch.tensor(torch.inf)
    history = []
    for norm in (good, good, bad, good, good, good, torch.tensor(torch.nan), good):
        history.append((scale.accepts(norm), scale.value))
    assert [value for _, value in history] == [8, 8, 4, 4, 4, 8, 4, 4]
    assert [accepted for accepted, _ in history] == [True, True, False, True, True, True, False, True]


def test_the_loss_scale_has_bounds() -> None:
    scale = LossScale(initial=MAX_SCALE, growth_interval=1)
    assert scale.accepts(torch.tensor(1.0))
    assert scale.value == MAX_SCALE
    lost = LossScale(initial=1.0)
    with pytest.raises(UserError, match="P030"):
        lost.accepts(torch.tensor(torch.inf))


def test_only_fp16_has_a_loss_scale() -> None:
    assert build_loss_scale(Plan(precision="bf16"), TrainSection(precision={"lm_head": "fp32"})) is None
    assert build_loss_scale(Plan(precision="fp16"), TrainSection()) is not None
    assert build_loss_scale(Plan(precision="fp32"), TrainSection(precision={"lm_head": "fp16"})) is not None


def test_micro_batches_share_one_copy_of_a_weight_until_the_step_ends() -> None:
    layer, inputs = nn.Linear(8, 8, bias=False), torch.randn(3, 4, 8)
    copies: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape == layer.weight.shape and tensor.dtype == torch.bfloat16:
            copies.append(tensor.untyped_storage().data_ptr())
        return tensor

    def forward(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept), torch.autocast("cpu", torch.bfloat16):
            return layer(x.requires_grad_()).float().square().sum()

    def step(shared: bool) -> Tensor:
        """As a pipeline does: both forwards before the first backward, and another forward between the backwards."""
        layer.weight.grad = None
        with kept_weight_casts() if shared else nullcontext():
            first, second = forward(inputs[0]), forward(inputs[1])
            first.backward()
            third = forward(inputs[2])
            second.backward()
            third.backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    apart = step(shared=False)
    assert len(set(copies)) > 1
    copies.clear()
    assert torch.equal(step(shared=True), apart)
    assert len(copies) == 3
    assert len(set(copies)) == 1
    with torch.no_grad():
        layer.weight.mul_(2)  # the update
    assert not torch.equal(step(shared=True), apart)
