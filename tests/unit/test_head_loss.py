"""The fused head and loss equals a matmul and a cross-entropy, without full logits."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimaran.core import Mesh, Plan
from trimaran.models import PRESETS
from trimaran.nets import Network, RMSNorm, decoder_network, initialise
from trimaran.parallel import autocast, override_precision
from trimaran.train import (
    IGNORED,
    LanguageObjective,
    LossHead,
    build_loss_function,
    chunk_rows,
    compute_losses,
    head_losses,
    row_losses,
)
from trimaran.train.loss import cross_entropy

CPU = torch.device("cpu")
ROWS, WIDTH, VOCAB = 21, 8, 50
SPEC = replace(PRESETS["tiny"], layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64)
# Relative error of a norm, from the rounding of logits and their gradients.
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def random_inputs(dtype: torch.dtype, labels: str = "some ignored") -> tuple[Tensor, nn.Parameter, Tensor]:
    source = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, WIDTH, generator=source, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=source, dtype=torch.float64).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)  # weights are fp32 in every plan; here they are exact in `dtype`
    chosen = torch.randint(0, VOCAB, (ROWS,), generator=source)
    if labels != "all valid":
        chosen[:: 4 if labels == "some ignored" else 1] = IGNORED
    return hidden, nn.Parameter(weight.to(wide)), chosen


def relative_error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-300))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("rows", [ROWS, 7, 20, 1], ids=["one chunk", "even chunks", "a chunk of one row", "row by row"])
@pytest.mark.parametrize("labels", ["all valid", "some ignored"])
def test_loss_and_gradients_are_those_of_a_cross_entropy(dtype: torch.dtype, rows: int, labels: str) -> None:
    hidden, weight, chosen = random_inputs(dtype, labels)
    total, each = head_losses(hidden, weight, chosen, rows=rows)
    (0.37 * total).sum().backward()
    plain, matrix = (given.detach().double().requires_grad_() for given in (hidden, weight))
    expected = F.cross_entropy(plain @ matrix.t(), chosen, ignore_index=IGNORED, reduction="none")
    (0.37 * expected.sum()).backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (dtype, weight.dtype)  # pyrefly: ignore
    assert relative_error(total.detach(), expected.sum().detach()) < BOUNDS[dtype]
    assert relative_error(each, expected.detach()) < BOUNDS[dtype]
    assert relative_error(hidden.grad, plain.grad) < BOUNDS[dtype]
    assert relative_error(weight.grad, matrix.grad) < BOUNDS[dtype]
    assert not each.requires_grad
    assert each[chosen == IGNORED].count_nonzero() == 0


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 4099)])
def test_row_losses_are_exact_for_any_logits(shape: tuple[int, int]) -> None:
    logits = 60 * torch.randn(shape, generator=torch.Generator().manual_seed(0))  # most probabilities are 0 in fp32
    labels = torch.arange(shape[0]) % shape[1]
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    expected.sum().backward()
    losses = row_losses(logits, labels, grad_scale=1.0)
    assert exact.grad is not None
    assert torch.allclose(losses.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.allclose(logits.double(), exact.grad, rtol=1e-5, atol=1e-7)  # overwritten with the gradient


@pytest.mark.parametrize("rows", [ROWS, 7])
def test_a_weight_in_16_bits_gets_its_gradient_in_16_bits(rows: int) -> None:
    hidden, weight, chosen = random_inputs(torch.bfloat16)
    half = nn.Parameter(weight.detach().bfloat16())
    for each in (weight, half):
        (head_losses(hidden, each, chosen, rows=rows)[0] * 0.37).sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16
    assert weight.grad is not None
    assert torch.equal(half.grad, weight.grad.bfloat16()), "equal except for the last rounding"


@pytest.mark.parametrize("rows", [ROWS, 7])
def test_without_a_valid_label_loss_and_gradients_are_zero(rows: int) -> None:
    hidden, weight, chosen = random_inputs(torch.float32, "none valid")
    total, _ = head_losses(hidden, weight, chosen, rows=rows)
    total.sum().backward()
    assert float(total.detach()) == 0
    for each in (hidden.grad, weight.grad):
        assert each is not None
        assert each.count_nonzero() == 0


def test_probabilities_below_the_fp16_minimum_still_have_gradients() -> None:
    hidden = torch.zeros(64, WIDTH, dtype=torch.float16)
    hidden[:, 0] = 1
    weight = nn.Parameter(torch.zeros(VOCAB, WIDTH))
    with torch.no_grad():
        weight[0, 0] = 17.5  # the others have a probability of 2.5e-8 each: 0 in fp16
    total, _ = head_losses(hidden, weight, torch.zeros(64, dtype=torch.long), rows=64)
    (total * 2.0**16).sum().backward()
    assert weight.grad is not None
    expected = 64 * 2.0**16 * torch.softmax(weight.detach()[:, 0].double(), 0)
    assert relative_error(weight.grad[1:, 0], expected[1:]) < 1e-2
    assert weight.grad.isfinite().all()


def test_frozen_inputs_get_no_gradient_and_no_saved_tensor() -> None:
    hidden, weight, chosen = random_inputs(torch.float32)
    head_losses(hidden, weight.detach(), chosen, rows=7)[0].sum().backward()
    alone = hidden.grad
    assert weight.grad is None
    hidden, weight, chosen = random_inputs(torch.float32)
    total, _ = head_losses(hidden.detach(), weight, chosen, rows=7)
    assert total.grad_fn is not None
    assert len(total.grad_fn.saved_tensors) == 1  # pyrefly: ignore[missing-attribute]
    total.sum().backward()
    both = random_inputs(torch.float32)
    head_losses(*both, rows=7)[0].sum().backward()
    assert torch.equal(both[1].grad, weight.grad)  # pyrefly: ignore[bad-argument-type]
    assert torch.equal(both[0].grad, alone)  # pyrefly: ignore[bad-argument-type]


def test_evaluation_computes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*_: object, grad_scale: float | None, **__: object) -> Tensor:
        assert grad_scale is None, "evaluation must not compute gradients of logits"
        return torch.ones(1)

    monkeypatch.setattr(cross_entropy, "row_losses", check)
    hidden, weight, chosen = random_inputs(torch.float32)
    with torch.no_grad():
        total, _ = head_losses(hidden, weight, chosen, rows=7)
    assert not total.requires_grad


def test_a_second_backward_raises() -> None:
    total, _ = head_losses(*random_inputs(torch.float32), rows=ROWS)
    total.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        total.sum().backward()


def test_chunks_are_small_but_large_enough_to_fill_a_gpu() -> None:
    assert chunk_rows(128_256, 2) == 1024
    assert chunk_rows(1_000_000, 4) == 1024, "never fewer"
    assert chunk_rows(32_000, 2) == 4096
    assert 250e6 < chunk_rows(32_000, 2) * 32_000 * 2 < 256 * 2**20


def network_with(tied: bool = False, **patterns: str) -> Network:
    spec = replace(SPEC, tied=tied)
    network = decoder_network(spec)
    initialise(network.module, seed=0, spec=spec)
    override_precision(network, patterns, CPU)
    return network


def micro_batch() -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(7)
    tokens, labels = (torch.randint(0, SPEC.vocab, (3, 16), generator=source) for _ in range(2))
    labels[torch.rand(3, 16, generator=source) < 0.3] = IGNORED
    return {"tokens": tokens, "labels": labels, "sources": torch.tensor([[0], [2], [0]]).expand(3, 16).contiguous()}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("head", ["plan", "fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loss", ["fused", "chunked"])
def test_a_network_with_a_fused_loss_has_the_losses_and_gradients_of_full_logits(
    monkeypatch: pytest.MonkeyPatch, precision: str, head: str, tied: bool, loss: str
) -> None:
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda *_: 13)
    patterns = {} if head == "plan" else {"lm_head": head}
    objective, inputs = LanguageObjective(("one", "two", "three")), micro_batch()
    found, sizes = [], []
    for how in ("logits", loss):
        network = network_with(tied, **patterns)
        head_module = network.module.get_submodule("lm_head")
        head_module.register_forward_hook(lambda _, __, out: sizes.append(out.numel()))
        plan = Plan.model_validate({"precision": precision, "loss": how})
        with autocast(plan, CPU):
            losses, _ = build_loss_function(objective, network, plan)(inputs)
        (losses.total * ((2.0**16 if precision == "fp16" else 1.0) / 33)).backward()
        assert losses.parts is not None
        gradients = {name: each.grad for name, each in network.module.named_parameters()}
        found.append((losses.total.detach().reshape(1), losses.parts, gradients))
    assert sizes == [inputs["labels"].numel() * SPEC.vocab, 1 + inputs["labels"].numel()]
    (total, parts, gradients), (our_total, our_parts, our_gradients) = found
    bound = 2e-2 if "bf16" in (precision, head) else 2e-3 if precision == "fp16" else 1e-5
    assert relative_error(our_total, total) < bound / 10
    assert torch.equal(our_parts[:, 1], parts[:, 1])
    assert our_parts[1].tolist() == [0, 0]
    assert relative_error(our_parts, parts) < bound / 10
    assert our_gradients.keys() == gradients.keys()
    for name, each in gradients.items():
        assert relative_error(our_gradients[name], each) < bound, name


def test_outside_computing_losses_a_fused_head_returns_logits() -> None:
    network, inputs = network_with(), micro_batch()
    before, _ = network.forward(inputs)
    assert isinstance(network.head, nn.Linear)
    head = LossHead(network.head, chunked=False)
    with head.computing_losses(inputs["labels"]):
        assert network.forward(inputs)[0].shape == (1 + inputs["labels"].numel(),)
    with pytest.raises(AssertionError, match="each row has a label"), head.computing_losses(inputs["labels"][:1]):
        network.forward(inputs)
    assert torch.equal(network.forward(inputs)[0], before)
    assert sorted(network.module.state_dict()) == sorted(network_with().module.state_dict())


def test_a_head_with_a_bias_falls_back_to_full_logits(caplog: pytest.LogCaptureFixture) -> None:
    network, objective, inputs = network_with(), LanguageObjective(), micro_batch()
    network.module.lm_head = nn.Linear(SPEC.hidden, SPEC.vocab)
    expected, _ = compute_losses(objective, network, inputs)
    with caplog.at_level(logging.WARNING):
        losses, _ = build_loss_function(objective, network, Plan(loss="fused"))(inputs)
    assert torch.equal(losses.total, expected.total)
    assert "using full logits" in caplog.text


def test_a_plan_with_tp_uses_full_logits() -> None:
    assert cross_entropy.build_loss_head(network_with(), Plan(loss="fused", mesh=Mesh(tp=2))) is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_activations_have_the_dtype_of_the_plan_from_the_embedding_on(precision: str) -> None:
    network, plan, seen = network_with(), Plan.model_validate({"precision": precision}), []
    for block in network.blocks:
        block.register_forward_hook(lambda _, inputs, out: seen.extend([inputs[0].dtype, out[0].dtype]))
    with autocast(plan, CPU):
        network.forward(micro_batch())
    assert set(seen) == {getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision])}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_of_16_bit_activations_is_summed_in_fp32(dtype: torch.dtype) -> None:
    x = torch.randn(4, 65_536, generator=torch.Generator().manual_seed(1)).to(dtype)
    norm = RMSNorm(x.shape[1], eps=1e-6)
    with torch.autocast("cpu", dtype=dtype):
        found = norm(x).detach()
    expected = x.double() / x.double().square().mean(1, keepdim=True).sqrt()
    assert found.dtype == dtype
    # One rounding per result. A 16-bit sum of so many squares would saturate at a few hundred.
    assert relative_error(found, expected) < torch.finfo(dtype).eps / 2
