"""The router's losses, capacity and statistics, against a token-by-token reference."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trimaran.core import ModelSection, UserError
from trimaran.models import PRESETS, ExpertSpec, ExpertUnit, ModelSpec, RouterSpec, spec_from_hf, spec_of, spec_to_hf
from trimaran.nets import Context, MoeLayer, Network, capacity_of, choose_experts, decoder_network, initialise, route
from trimaran.train import router_details, routing_counts

EXPERTS = ExpertSpec(num_experts=6, top_k=2, ffn=16, shared_ffn=24, shared_gate=True)
HIDDEN = 16


def moe_layer(**fields: Any) -> MoeLayer:
    torch.manual_seed(3)
    module = MoeLayer(replace(EXPERTS, **fields), HIDDEN)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return module


def stream(*shape: int) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(5))


def reference(module: MoeLayer, x: Tensor) -> tuple[Tensor, float, int]:
    """Return the layer's output, its loss and the number of dropped choices, computed token by token."""
    spec, (gate, up, down) = module.spec, module.experts.parameters()
    out, loss, dropped = torch.zeros_like(x), 0.0, 0
    for row, sequence in enumerate(x):
        limit = math.ceil(spec.capacity * len(sequence) * spec.top_k / spec.num_experts) if spec.capacity else math.inf
        taken, requested, chances = [0] * spec.num_experts, [0] * spec.num_experts, []
        for position, token in enumerate(sequence):
            scores = module.gate.weight @ token
            chances.append(scores.softmax(0))
            loss += spec.z_loss * float(scores.exp().sum().log()) ** 2
            best = chances[-1].argsort(descending=True)[: spec.top_k]
            assert module.shared_expert is not None
            assert module.shared_expert_gate is not None
            out[row, position] = module.shared_expert(token) * module.shared_expert_gate(token).sigmoid()
            for expert in best.tolist():
                requested[expert] += 1
                if taken[expert] >= limit:
                    dropped += 1
                    continue
                taken[expert] += 1
                inner = F.silu(gate[expert] @ token) * (up[expert] @ token)
                out[row, position] += chances[-1][expert] / chances[-1][best].sum() * (down[expert] @ inner)
        fractions = torch.tensor(requested) / sum(requested)
        loss += spec.balance * spec.num_experts * float(sum((fractions * each).sum() for each in chances))
    return out, loss, dropped


@pytest.mark.parametrize("fields", [{}, {"z_loss": 0.03}, {"capacity": 0.5}, {"capacity": 1.2, "z_loss": 0.01}])
def test_an_moe_layer_equals_its_formula(fields: dict[str, float]) -> None:
    module, x = moe_layer(**fields), stream(3, 14)
    out, loss = module(x)
    with torch.no_grad():
        wanted, cost, dropped = reference(module, x)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    assert loss.item() == pytest.approx(cost, rel=1e-5)
    assert module.take_routing_stats()[-2] == dropped
    assert (dropped > 0) == ("capacity" in fields), "the capacity must drop something"


def test_the_router_losses_have_the_gradients_of_their_formulas() -> None:
    x = stream(2, 9)
    weight = torch.randn(6, HIDDEN, requires_grad=True)
    spec = replace(EXPERTS, balance=0.0, z_loss=0.5)
    (ours,) = torch.autograd.grad(route(x @ weight.T, spec, Context(), limited=True).loss, weight)
    scores = x @ weight.T
    (theirs,) = torch.autograd.grad(0.5 * scores.exp().sum(-1).log().square().sum(), weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_dropped_tokens_have_no_gradient_and_do_not_affect_others() -> None:
    free, tight = moe_layer(shared_ffn=0, shared_gate=False), moe_layer(shared_ffn=0, shared_gate=False, capacity=1e-6)
    x = stream(1, 12).requires_grad_()
    out, _ = tight(x)
    full: set[int] = set()
    empty = []  # the positions whose experts are both full
    for position, choices in enumerate(tight.gate(x).topk(2).indices[0].tolist()):
        empty += [position] if full >= set(choices) else []
        full |= set(choices)
    assert empty
    assert not out[0, empty].any()
    torch.testing.assert_close(out[0, 0], free(x)[0][0, 0])
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    assert gradient.isfinite().all()
    assert not gradient[0, empty].any()


def test_the_capacity_applies_to_each_sequence_separately() -> None:
    module, x = moe_layer(capacity=0.8), stream(4, 10)
    together = module(x)[0]
    separate = torch.cat([module(row[None])[0] for row in x])
    torch.testing.assert_close(together, separate, rtol=1e-5, atol=1e-6)


def test_the_capacity_is_exact_and_applies_in_training_only() -> None:
    assert capacity_of(replace(EXPERTS, capacity=1.1, num_experts=2, top_k=1), 20) == 11
    assert capacity_of(replace(EXPERTS, capacity=1.11, num_experts=2, top_k=1), 20) == 12
    assert capacity_of(replace(EXPERTS, capacity=0.001), 8) == 1
    free, tight, x = moe_layer(), moe_layer(capacity=0.5), stream(2, 12)
    assert not torch.allclose(free(x)[0], tight(x)[0])
    assert torch.equal(free.eval()(x)[0], tight.eval()(x)[0])


def test_routing_stats_count_only_training() -> None:
    module, x = moe_layer(capacity=0.5), stream(2, 8)
    module(x)
    first = module.take_routing_stats()
    assert first[:6].sum() == 2 * 8 * 2
    assert first[-1] == pytest.approx(module.gate(x).logsumexp(-1).square().sum().item(), rel=1e-5)
    with torch.no_grad():
        module(x)
    module.eval()(x)
    assert not module.take_routing_stats().any()
    checkpoint(module.train(), x.requires_grad_(), use_reentrant=False)[0].sum().backward()
    assert torch.equal(module.take_routing_stats(), 2 * first)


def small(**fields: Any) -> ModelSpec:
    spec = PRESETS["tiny-moe"]
    experts = ExpertSpec(num_experts=4, top_k=1, ffn=8, **fields)
    block = replace(spec.block, experts=experts, qk_norm=True)
    return replace(spec, layers=2, hidden=16, heads=2, kv_heads=2, head_dim=8, block=block)


def test_router_statistics_equal_a_count_by_hand() -> None:
    spec = small(capacity=0.5)
    network = decoder_network(spec)
    initialise(network.module, seed=1, spec=spec)
    # The first layer sends 8 tokens to expert 2, which drops half of them; the second is even.
    first, second = (layer.mlp for layer in network.blocks)
    assert isinstance(first, MoeLayer)
    assert isinstance(second, MoeLayer)
    first.routing_stats[:] = torch.tensor([0.0, 0, 8, 0, 4, 24])
    second.routing_stats[:] = torch.tensor([4.0, 4, 4, 4, 0, 16])
    assert router_metrics(network) == {
        "imbalance": (4 + 1) / 2,
        "idle": (3 / 4 + 0) / 2,
        "dropped": (4 / 8 + 0) / 2,
        "z": (24 / 8 + 16 / 16) / 2,
        "entropy": (0 + 1) / 2,
    }
    network.forward({"tokens": torch.arange(16).reshape(2, 8)})
    assert 0 < router_metrics(network)["dropped"] < 1
    assert not first.routing_stats.any()


def test_a_dense_network_has_no_statistics() -> None:
    with torch.device("meta"):
        network = decoder_network(PRESETS["tiny"])
    assert routing_counts((network,), torch.device("cpu")) is None
    assert router_details(None, (network,))() == {}


def router_metrics(network: Network) -> dict[str, float]:
    """Return the statistics since the last call, of one rank."""
    return router_details(routing_counts((network,), torch.device("cpu")), (network,))()["router"]


def test_routing_stats_follow_the_weights_and_are_not_in_the_state_dict() -> None:
    with torch.device("meta"):
        module = MoeLayer(EXPERTS, HIDDEN)
    assert module.routing_stats.is_meta
    module.to_empty(device="cpu")
    assert module.routing_stats.tolist() == [0.0] * 8
    assert not [name for name in module.state_dict() if "stats" in name]


def test_config_json_keeps_fields_that_transformers_does_not_have() -> None:
    spec = replace(small(z_loss=0.001, capacity=1.25), name="qwen3_moe")
    config = spec_to_hf(spec)
    assert (config["router_z_loss_coef"], config["expert_capacity_factor"]) == (0.001, 1.25)
    assert spec_from_hf(config, where="config.json") == spec
    assert not {"router_z_loss_coef", "expert_capacity_factor"} & spec_to_hf(small()).keys()


def test_a_recipe_sets_z_loss_and_capacity_and_wrong_values_are_refused() -> None:
    section = ModelSection(preset="tiny-moe", shape={"experts": {"z_loss": 0.001, "capacity": 2}})
    spec = spec_of(section)
    assert isinstance(spec, ModelSpec)
    assert spec.block.experts == replace(PRESETS["tiny-moe"].block.experts or EXPERTS, z_loss=0.001, capacity=2.0)
    for field in ("z_loss", "capacity"):
        with pytest.raises(UserError, match=rf"M009: experts\.{field}: -1\.0 is not between 0"):
            spec_of(ModelSection(preset="tiny-moe", shape={"experts": {field: -1.0}}))


def test_a_correction_bias_follows_the_loads_and_has_no_gradient() -> None:
    module = moe_layer(router=RouterSpec(scoring="sigmoid", correction=True, correction_rate=0.5), balance=0.0)
    assert module.correction_bias is not None
    before = module(stream(2, 9))[0]
    applied, refused = torch.tensor(1.0), torch.tensor(0.0)
    module.update_correction(torch.tensor([6.0, 0, 3, 3, 4, 2], dtype=torch.float64), applied)
    assert module.correction_bias.tolist() == [-0.5, 0.5, 0.0, 0.0, -0.5, 0.5]
    module.update_correction(torch.tensor([9.0, 0, 0, 0, 0, 0], dtype=torch.float64), refused)
    assert module.correction_bias.tolist() == [-0.5, 0.5, 0.0, 0.0, -0.5, 0.5]
    assert not module.correction_bias.requires_grad
    assert not torch.allclose(module(stream(2, 9))[0], before), "the bias must change which experts are chosen"
    meta = MoeLayer(module.spec, HIDDEN).to("meta").to_empty(device="cpu")
    assert meta.correction_bias is not None
    assert not meta.correction_bias.any()


def test_a_router_with_a_correction_bias_balances_loads_that_it_does_not_learn() -> None:
    module = moe_layer(router=RouterSpec(scoring="sigmoid", correction=True, correction_rate=0.005), balance=0.0)
    with torch.no_grad():
        module.gate.weight[0].add_(0.5)
    imbalances = []
    for _ in range(60):
        module(stream(8, 16))
        loads = module.take_routing_stats()[:6]
        imbalances.append((loads.max() / loads.mean()).item())
        module.update_correction(loads, torch.tensor(1.0))
    assert imbalances[-1] < 1.1 < imbalances[0]


def test_groups_limit_the_experts_of_a_token() -> None:
    spec = replace(EXPERTS, num_experts=8, router=RouterSpec(groups=4, top_groups=1, group_top=2))
    choices, weights, _ = choose_experts(torch.randn(50, 8, generator=torch.Generator().manual_seed(1)), spec)
    assert (choices[:, 0] // 2 == choices[:, 1] // 2).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(50))


def test_dense_layers_do_not_count_as_idle_experts() -> None:
    spec = PRESETS["tiny-moe"]
    assert spec.block.experts is not None
    experts = replace(spec.block.experts, dense_layers=(0,), unit=ExpertUnit(bias=True, limit=7.0))
    spec = replace(spec, block=replace(spec.block, experts=experts))
    network = decoder_network(spec)
    initialise(network.module, seed=1, spec=spec)
    biases = [each for name, each in network.module.named_parameters() if name.endswith("_proj_bias")]
    assert biases
    assert not any(each.any() for each in biases)
    network.forward({"tokens": torch.randint(0, spec.vocab, (2, 64), generator=torch.Generator().manual_seed(1))})
    router = router_details(routing_counts([network], torch.device("cpu")), [network])()["router"]
    assert router["idle"] == 0
    assert router["entropy"] > 0.8
