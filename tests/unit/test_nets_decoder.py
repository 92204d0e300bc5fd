import copy
import resource
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.models import PRESETS, ModelSpec
from trimaran.nets import Decoder, MoeLayer, initialise

DENSE = replace(PRESETS["tiny"], layers=2)
QWEN_3 = replace(DENSE, block=replace(DENSE.block, qk_norm=True))
MIXED = replace(PRESETS["tiny-moe"], layers=2)


def decoder(spec: ModelSpec, seed: int = 0) -> Decoder:
    module = Decoder(spec)
    initialise(module, seed=seed, spec=spec)
    return module


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 320, shape, generator=torch.Generator().manual_seed(7))


def loss_of(module: Decoder, batch: Tensor) -> Tensor:
    logits, balance = module(tokens=batch)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum") + balance


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_the_module_has_the_parameters_that_the_spec_counts(name: str) -> None:
    assert sum(each.numel() for each in Decoder(PRESETS[name]).parameters()) == PRESETS[name].num_parameters


def test_the_biggest_preset_is_built_on_the_meta_device_quickly_and_without_memory() -> None:
    spec = PRESETS["llama-3.1-405b"]
    peak, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with torch.device("meta"):
        module = Decoder(spec)
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000  # KiB
    assert sum(each.numel() for each in module.parameters()) == spec.num_parameters


@pytest.mark.parametrize("spec", [DENSE, MIXED], ids=["dense", "mixed"])
def test_a_module_from_the_meta_device_computes_the_same_and_stays_tied(spec: ModelSpec) -> None:
    with torch.device("meta"):
        module = Decoder(spec)
    module.to_empty(device="cpu")
    assert module.lm_head is not None
    assert module.embed_tokens is not None
    assert module.lm_head.weight is module.embed_tokens.weight
    initialise(module, seed=0, spec=spec)
    batch = tokens(2, 16)
    assert torch.equal(module(tokens=batch)[0], decoder(spec)(tokens=batch)[0])


def test_later_tokens_do_not_change_earlier_logits() -> None:
    module, batch = decoder(MIXED), tokens(1, 24)
    changed = batch.clone()
    changed[:, 16:] = (changed[:, 16:] + 1) % 320
    before, after = module(tokens=batch)[0], module(tokens=changed)[0]
    torch.testing.assert_close(before[:, :16], after[:, :16], atol=1e-6, rtol=0)
    assert not torch.allclose(before[:, 16:], after[:, 16:], atol=1e-3)


@pytest.mark.parametrize("spec", [DENSE, QWEN_3, MIXED], ids=["dense", "qk-norm", "mixed"])
def test_a_packed_document_gives_the_same_logits_as_alone(spec: ModelSpec) -> None:
    module, batch = decoder(spec), tokens(2, 24)
    lengths = [(5, 19), (10, 6, 8)]
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    packed, _ = module(tokens=batch, documents=documents)
    for row, parts in enumerate(lengths):
        for logits, alone in zip(packed[row].split(parts), batch[row].split(parts), strict=True):
            torch.testing.assert_close(logits, module(tokens=alone[None])[0][0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(packed, module(tokens=batch)[0], atol=1e-3)


@pytest.mark.parametrize("spec", [DENSE, QWEN_3, MIXED], ids=["dense", "qk-norm", "mixed"])
def test_gradients_reach_every_parameter(spec: ModelSpec) -> None:
    module = decoder(spec)
    loss_of(module, tokens(4, 32)).backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_an_expert_without_tokens_has_a_zero_gradient() -> None:
    module = decoder(MIXED)
    loss_of(module, tokens(1, 2)).backward()  # at most four of the eight experts are chosen
    for layer in module.layers:
        assert isinstance(layer.mlp, MoeLayer)
        for parameter in layer.mlp.experts.parameters():
            assert parameter.grad is not None
            assert 2 <= (parameter.grad.flatten(1).abs().amax(1) > 0).sum() <= 4


def test_an_moe_layer_equals_its_formula() -> None:
    spec = MIXED.block.experts
    assert spec is not None
    module = decoder(MIXED).layers[0].mlp
    assert isinstance(module, MoeLayer)
    torch.manual_seed(0)
    x = torch.randn(2, 6, MIXED.hidden)
    out, balance = module(x)
    probabilities = (x @ module.gate.weight.T).softmax(-1)
    gate, up, down = (parameter for parameter in module.experts.parameters())
    assert module.shared_expert is not None
    assert module.shared_expert_gate is not None
    expected = 0.0
    for row in range(2):
        loads = torch.zeros(spec.num_experts)
        for position in range(6):
            token, chances = x[row, position], probabilities[row, position]
            best = chances.argsort(descending=True)[: spec.top_k]
            loads[best] += 1
            wanted = module.shared_expert(token) * module.shared_expert_gate(token).sigmoid()
            for expert in best:
                inner = F.silu(gate[expert] @ token) * (up[expert] @ token)
                wanted = wanted + chances[expert] / chances[best].sum() * (down[expert] @ inner)
            torch.testing.assert_close(out[row, position], wanted, atol=1e-6, rtol=1e-4)
        fractions = loads / (6 * spec.top_k)
        expected += spec.balance * 6 * spec.num_experts * (fractions * probabilities[row].mean(0)).sum()
    torch.testing.assert_close(balance, torch.as_tensor(expected))


def test_the_balance_loss_does_not_depend_on_the_batching() -> None:
    module, batch = decoder(MIXED), tokens(4, 16)
    _, together = module(tokens=batch)
    separate = torch.stack([module(tokens=row[None])[1] for row in batch]).sum()
    assert together.dtype == torch.float32
    assert together.shape == ()
    torch.testing.assert_close(together, separate, rtol=1e-6, atol=0)
    even = 0.01 * 2 * 4 * 16  # coefficient, layers, sequences, tokens: the loss of a perfect balance
    assert even <= together < 2 * even
    assert decoder(DENSE)(tokens=batch)[1] == 0


@pytest.mark.parametrize(
    ("spec", "precision"),
    [
        pytest.param(MIXED, torch.float32, id="mixed-fp32"),
        pytest.param(MIXED, torch.bfloat16, id="mixed-bf16", marks=pytest.mark.slow),
        pytest.param(QWEN_3, torch.bfloat16, id="qk-norm-bf16", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_compute_the_same(spec: ModelSpec, precision: torch.dtype) -> None:
    eager, batch = decoder(replace(spec, layers=1)), tokens(2, 16)
    compiled = copy.deepcopy(eager)
    torch.compiler.reset()
    for layer in compiled.layers:
        layer.compile(backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        losses = [loss_of(module, batch) for module in (eager, compiled)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    for (name, one), other in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).norm() <= torch.finfo(precision).eps * one.grad.norm(), name


@pytest.mark.parametrize("spec", [DENSE, QWEN_3, MIXED], ids=["dense", "qk-norm", "mixed"])
def test_bf16_autocast_stays_close_to_fp32(spec: ModelSpec, recwarn: pytest.WarningsRecorder) -> None:
    module, batch = decoder(spec), tokens(2, 32)
    exact = loss_of(module, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, balance = module(tokens=batch)
        loss = loss_of(module, batch)
    assert (logits.dtype, balance.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(loss, exact, rtol=2e-3, atol=0)
    # torch itself warns on CPUs that have no bf16.
    assert not [warning for warning in recwarn if "needs a cpu with bf16" not in str(warning.message)]
