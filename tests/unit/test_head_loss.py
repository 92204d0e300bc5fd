"""Head and loss in one: the numbers of a product and a cross-entropy, without the logits."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimaran.core import Mesh, Plan
from trimaran.models import PRESETS
from trimaran.nets import Network, decoder_network, initialise
from trimaran.nets.attention import RMSNorm
from trimaran.parallel import autocast, override_precision
from trimaran.train.loss import head_loss
from trimaran.train.loss.cross_entropy import IGNORED
from trimaran.train.loss.head_loss import LossHead, head_losses, piece_rows
from trimaran.train.loss.objective import LanguageObjective
from trimaran.train.steppers.stepper import judge_of, losses_of

CPU = torch.device("cpu")
ROWS, WIDTH, VOCAB = 21, 8, 50
SPEC = replace(PRESETS["tiny"], layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64)
# Relative error of a norm: what the rounding of logits and of their gradients leaves.
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def drawn(dtype: torch.dtype, labels: str = "some ignored") -> tuple[Tensor, nn.Parameter, Tensor]:
    source = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, WIDTH, generator=source, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=source, dtype=torch.float64).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)  # weights are fp32 in every plan, here without a rest to round off
    chosen = torch.randint(0, VOCAB, (ROWS,), generator=source)
    if labels != "all valid":
        chosen[:: 4 if labels == "some ignored" else 1] = IGNORED
    return hidden, nn.Parameter(weight.to(wide)), chosen


def off(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-300))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("rows", [ROWS, 7, 20, 1], ids=["whole", "even pieces", "a piece of one row", "row by row"])
@pytest.mark.parametrize("labels", ["all valid", "some ignored"])
def test_loss_and_gradients_are_those_of_a_cross_entropy(dtype: torch.dtype, rows: int, labels: str) -> None:
    hidden, weight, chosen = drawn(dtype, labels)
    total, each = head_losses(hidden, weight, chosen, rows=rows)
    (0.37 * total).sum().backward()
    plain, matrix = (given.detach().double().requires_grad_() for given in (hidden, weight))
    expected = F.cross_entropy(plain @ matrix.t(), chosen, ignore_index=IGNORED, reduction="none")
    (0.37 * expected.sum()).backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (dtype, weight.dtype)  # pyrefly: ignore
    assert off(total.detach(), expected.sum().detach()) < BOUNDS[dtype]
    assert off(each, expected.detach()) < BOUNDS[dtype]
    assert off(hidden.grad, plain.grad) < BOUNDS[dtype]
    assert off(weight.grad, matrix.grad) < BOUNDS[dtype]
    assert not each.requires_grad
    assert each[chosen == IGNORED].count_nonzero() == 0


@pytest.mark.parametrize("rows", [ROWS, 7])
def test_a_weight_in_16_bits_gets_its_gradient_in_16_bits(rows: int) -> None:
    hidden, weight, chosen = drawn(torch.bfloat16)
    half = nn.Parameter(weight.detach().bfloat16())
    for each in (weight, half):
        (head_losses(hidden, each, chosen, rows=rows)[0] * 0.37).sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16
    assert weight.grad is not None
    assert torch.equal(half.grad, weight.grad.bfloat16()), "but for the last rounding it is the same"


@pytest.mark.parametrize("rows", [ROWS, 7])
def test_without_a_valid_label_loss_and_gradients_are_zero(rows: int) -> None:
    hidden, weight, chosen = drawn(torch.float32, "none valid")
    total, _ = head_losses(hidden, weight, chosen, rows=rows)
    total.sum().backward()
    assert float(total.detach()) == 0
    for each in (hidden.grad, weight.grad):
        assert each is not None
        assert each.count_nonzero() == 0


def test_probabilities_below_what_fp16_holds_still_move_the_weights() -> None:
    hidden = torch.zeros(64, WIDTH, dtype=torch.float16)
    hidden[:, 0] = 1
    weight = nn.Parameter(torch.zeros(VOCAB, WIDTH))
    with torch.no_grad():
        weight[0, 0] = 17.5  # the others have a probability of 2.5e-8 each: 0 in fp16
    total, _ = head_losses(hidden, weight, torch.zeros(64, dtype=torch.long), rows=64)
    (total * 2.0**16).sum().backward()
    assert weight.grad is not None
    expected = 64 * 2.0**16 * torch.softmax(weight.detach()[:, 0].double(), 0)
    assert off(weight.grad[1:, 0], expected[1:]) < 1e-2
    assert weight.grad.isfinite().all()


def test_what_is_frozen_gets_no_gradient_and_nothing_is_made_for_it() -> None:
    hidden, weight, chosen = drawn(torch.float32)
    head_losses(hidden, weight.detach(), chosen, rows=7)[0].sum().backward()
    alone = hidden.grad
    assert weight.grad is None
    hidden, weight, chosen = drawn(torch.float32)
    total, _ = head_losses(hidden.detach(), weight, chosen, rows=7)
    assert total.grad_fn is not None
    assert len(total.grad_fn.saved_tensors) == 1  # pyrefly: ignore[missing-attribute]
    total.sum().backward()
    both = drawn(torch.float32)
    head_losses(*both, rows=7)[0].sum().backward()
    assert torch.equal(both[1].grad, weight.grad)  # pyrefly: ignore[bad-argument-type]
    assert torch.equal(both[0].grad, alone)  # pyrefly: ignore[bad-argument-type]


def test_an_evaluation_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, lift: float | None, **__: object) -> Tensor:
        assert lift is None, "the logits of an evaluation need not become gradients"
        return torch.ones(1)

    monkeypatch.setattr(head_loss, "row_losses", refuse)
    hidden, weight, chosen = drawn(torch.float32)
    with torch.no_grad():
        total, _ = head_losses(hidden, weight, chosen, rows=7)
    assert not total.requires_grad


def test_a_second_backward_is_refused_and_not_wrong() -> None:
    total, _ = head_losses(*drawn(torch.float32), rows=ROWS)
    total.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace operation"):
        total.sum().backward()


def test_pieces_are_small_and_yet_large_enough_to_multiply() -> None:
    assert piece_rows(128_256, 2) == 1024
    assert piece_rows(1_000_000, 4) == 1024, "never fewer"
    assert piece_rows(32_000, 2) == 4096
    assert 250e6 < piece_rows(32_000, 2) * 32_000 * 2 < 256 * 2**20


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
def test_a_network_is_judged_at_its_head_as_by_its_logits(
    monkeypatch: pytest.MonkeyPatch, precision: str, head: str, tied: bool, loss: str
) -> None:
    monkeypatch.setattr(head_loss, "piece_rows", lambda *_: 13)
    patterns = {} if head == "plan" else {"lm_head": head}
    objective, inputs = LanguageObjective(("one", "two", "three")), micro_batch()
    found, sizes = [], []
    for how in ("logits", loss):
        network = network_with(tied, **patterns)
        network.module.lm_head.register_forward_hook(lambda _, __, out: sizes.append(out.numel()))
        plan = Plan.model_validate({"precision": precision, "loss": how})
        with autocast(plan, CPU):
            losses, _ = judge_of(objective, network, plan)(inputs)
        (losses.total * ((2.0**16 if precision == "fp16" else 1.0) / 33)).backward()
        assert losses.parts is not None
        gradients = {name: each.grad for name, each in network.module.named_parameters()}
        found.append((losses.total.detach().reshape(1), losses.parts, gradients))
    assert sizes == [inputs["labels"].numel() * SPEC.vocab, 1 + inputs["labels"].numel()]
    (total, parts, gradients), (our_total, our_parts, our_gradients) = found
    bound = 2e-2 if "bf16" in (precision, head) else 2e-3 if precision == "fp16" else 1e-5
    assert off(our_total, total) < bound / 10
    assert torch.equal(our_parts[:, 1], parts[:, 1])
    assert our_parts[1].tolist() == [0, 0]
    assert off(our_parts, parts) < bound / 10
    assert our_gradients.keys() == gradients.keys()
    for name, each in gradients.items():
        assert off(our_gradients[name], each) < bound, name


def test_a_head_is_itself_again_once_the_loss_is_known() -> None:
    network, inputs = network_with(), micro_batch()
    before, _ = network.forward(inputs)
    assert isinstance(network.head, nn.Linear)
    head = LossHead(network.head, chunked=False)
    with head.judging(inputs["labels"]):
        assert network.forward(inputs)[0].shape == (1 + inputs["labels"].numel(),)
    with pytest.raises(AssertionError, match="each row has a label"), head.judging(inputs["labels"][:1]):
        network.forward(inputs)
    assert torch.equal(network.forward(inputs)[0], before)
    assert sorted(network.module.state_dict()) == sorted(network_with().module.state_dict())


def test_a_head_with_a_bias_ends_in_logits(caplog: pytest.LogCaptureFixture) -> None:
    network, objective, inputs = network_with(), LanguageObjective(), micro_batch()
    network.module.lm_head = nn.Linear(SPEC.hidden, SPEC.vocab)
    expected, _ = losses_of(objective, network, inputs)
    with caplog.at_level(logging.WARNING):
        losses, _ = judge_of(objective, network, Plan(loss="fused"))(inputs)
    assert torch.equal(losses.total, expected.total)
    assert "they stay" in caplog.text


def test_a_plan_of_tp_keeps_its_logits() -> None:
    assert head_loss.loss_head(network_with(), Plan(loss="fused", mesh=Mesh(tp=2))) is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_stream_has_the_dtype_of_the_plan_from_the_embedding_on(precision: str) -> None:
    network, plan, seen = network_with(), Plan.model_validate({"precision": precision}), []
    for block in network.blocks:
        block.register_forward_hook(lambda _, inputs, out: seen.extend([inputs[0].dtype, out[0].dtype]))
    with autocast(plan, CPU):
        network.forward(micro_batch())
    assert set(seen) == {getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision])}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_of_a_16_bit_stream_is_summed_in_fp32(dtype: torch.dtype) -> None:
    x = torch.randn(4, 65_536, generator=torch.Generator().manual_seed(1)).to(dtype)
    norm = RMSNorm(x.shape[1], eps=1e-6)
    with torch.autocast("cpu", dtype=dtype):
        found = norm(x).detach()
    expected = x.double() / x.double().square().mean(1, keepdim=True).sqrt()
    assert found.dtype == dtype
    # One rounding of each result; a sum of so many squares in 16 bits would stop at a few hundred.
    assert off(found, expected) < torch.finfo(dtype).eps / 2
