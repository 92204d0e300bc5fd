"""The graph of a loss shows whether rows depend on each other. Losses that are sums over rows are never suspected."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimaran.loop import mark_outputs, row_dependence

ROWS, FEATURES = 6, 7
DRAW = torch.Generator().manual_seed(0)
X, IMAGES = torch.randn(ROWS, 5, generator=DRAW), torch.rand(ROWS, FEATURES, generator=DRAW)
LABELS, WEIGHTS = torch.arange(ROWS) % FEATURES, torch.rand(ROWS, generator=DRAW)
CLASS_WEIGHTS = torch.rand(FEATURES, generator=DRAW)
SEQUENCES = torch.randn(ROWS, 4, 5, generator=DRAW)
FOURS, TWOS = torch.full((ROWS,), 4), torch.full((ROWS,), 2)
EYE = torch.eye(2 * ROWS, dtype=torch.bool)


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(5, FEATURES) for _ in range(3)]


def found(loss: Any, *inputs: Tensor) -> str | None:
    """Return the cause found in a loss of the outputs of one layer for each input."""
    outputs = [layer(each) for layer, each in zip(layers(), inputs, strict=False)]
    mark_outputs(outputs, "test")
    return row_dependence(loss(*outputs), "test", ROWS)


def nt_xent(out: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    return F.cross_entropy((z @ z.T / 0.5).masked_fill(EYE, -9.0), (torch.arange(2 * ROWS) + ROWS) % (2 * ROWS))


def clip_loss(images: Tensor, texts: Tensor) -> Tensor:
    scores = F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T * 3.0
    return (F.cross_entropy(scores, torch.arange(ROWS)) + F.cross_entropy(scores.T, torch.arange(ROWS))) / 2


def whitened(out: Tensor) -> Tensor:
    return F.batch_norm(out, None, None, training=True)


@pytest.mark.parametrize(
    ("loss", "inputs", "cause"),
    [
        (clip_loss, [X, X + 1], "compared"),
        (nt_xent, [torch.cat([X, X + 1])], "compared"),
        (lambda a, b: F.cross_entropy(F.cosine_similarity(a[:, None], b[None], dim=-1), LABELS), [X, X], "compared"),
        (lambda a: (a[:, None] - a[None]).square().sum(2).neg().exp().mean(), [X], "compared"),
        (lambda a, b: F.triplet_margin_loss(a, b, b.roll(1, 0), margin=9.0), [X, X + 1], "compared"),
        (lambda a, b: F.cross_entropy(-torch.cdist(a, b), LABELS), [X, X + 1], "compared"),
        (lambda a: torch.cdist(a, a).amin(1).mean(), [X], "compared"),
        (lambda a: F.cross_entropy(a @ IMAGES.T, LABELS), [X], "compared"),  # with features of a frozen tower
        (lambda a: F.cross_entropy(torch.einsum("id,jd->ij", a, IMAGES), LABELS), [X], "compared"),
        (lambda a: F.mse_loss(a, IMAGES).sqrt(), [X], "compared"),
        (lambda a: 1 - 2 * (a.sigmoid() * IMAGES).sum() / (a.sigmoid() + IMAGES).sum(), [X], "compared"),
        (lambda a: (a.mean(0) - 1).square().sum() + F.mse_loss(a, IMAGES), [X], "compared"),
        (lambda a: -F.logsigmoid(a[:3].sum(1) - a[3:].sum(1)).mean(), [X], "compared"),  # pairs that are cut apart
        (lambda a: F.relu(5 - a.std(0)).mean() + a.mean(), [X], "normalised"),
        (lambda a, b: (whitened(a).T @ whitened(b) / ROWS - 1).square().sum(), [X, X + 1], "normalised"),
        (lambda a: a.sum(0).exp().sum(), [SEQUENCES], "dimension"),
    ],
)
def test_a_loss_over_the_whole_batch_is_found(loss: Any, inputs: list[Tensor], cause: str) -> None:
    assert found(loss, *inputs) == cause


def kl(mean: Tensor, log_var: Tensor) -> Tensor:
    return -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum()


def cosine_head(out: Tensor) -> Tensor:
    weight = layers()[0].weight[:ROWS, :].repeat(1, 2)[:, :FEATURES]
    return F.cross_entropy(F.linear(F.normalize(out, dim=1), F.normalize(nn.Parameter(weight.detach()), dim=1)), LABELS)


def class_embeddings(out: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of as many classes as rows, whose embeddings another layer makes."""
    classes = layers()[1](nn.Parameter(torch.ones(ROWS, 5)))
    return F.cross_entropy(out @ classes.T, labels) + F.cross_entropy(-torch.cdist(out, classes.tanh()), labels)


def as_output(out: Tensor) -> Tensor:
    mark_outputs(out, "test")
    return out


HEALTHY: dict[str, tuple[Any, list[Tensor]]] = {
    "cross_entropy": (lambda a: F.cross_entropy(a, LABELS), [X]),
    "sum": (lambda a: F.cross_entropy(a, LABELS, reduction="sum"), [X]),
    "class weights": (lambda a: F.cross_entropy(a, LABELS, weight=CLASS_WEIGHTS), [X]),
    "label smoothing": (lambda a: F.cross_entropy(a, LABELS, label_smoothing=0.1, weight=CLASS_WEIGHTS), [X]),
    "ignored": (lambda a: F.cross_entropy(a, LABELS.masked_fill(LABELS == 1, -100)), [X]),
    "mse": (lambda a: F.mse_loss(a, IMAGES), [X]),
    "row weights": (lambda a: ((a - IMAGES).square().mean(1) * WEIGHTS).sum() / WEIGHTS.sum(), [X]),
    "masked": (lambda a: (a - IMAGES).square()[WEIGHTS > 0.3].mean(), [X]),
    "distillation": (lambda a: F.kl_div(a.log_softmax(1), IMAGES.softmax(1), reduction="batchmean"), [X]),
    "vae": (lambda a, m, v: F.binary_cross_entropy(a.sigmoid(), IMAGES, reduction="sum") + kl(m, v), [X, X, X]),
    "generator": (lambda a: F.binary_cross_entropy_with_logits(a, torch.ones_like(a)), [X]),
    "discriminator": (lambda a, b: F.softplus(-a).mean() + F.softplus(b).mean(), [X, X + 1]),
    "wasserstein": (lambda a, b: a.mean() - b.mean(), [X, X + 1]),
    "reinforce": (lambda a: -(a.log_softmax(1)[torch.arange(ROWS), LABELS] * WEIGHTS).sum(), [X]),
    "entropy": (lambda a: (a.softmax(1) * a.log_softmax(1)).sum(1).mean(), [X]),
    "triplet": (lambda a, b, c: F.triplet_margin_loss(a, b, c, margin=9.0), [X, X + 1, X - 1]),
    "cosine head": (cosine_head, [X]),
    "class embeddings": (lambda a: class_embeddings(a, torch.arange(ROWS) % 4), [X]),
    "einsum head": (
        lambda a: F.cross_entropy(torch.einsum("nd,kd->nk", a, nn.Parameter(IMAGES)), LABELS),
        [X],
    ),
    "frozen features": (lambda a: F.cross_entropy(a @ IMAGES.T, LABELS.flip(0)), [X]),  # of classes
    "frozen head": (
        lambda a: F.cross_entropy(as_output(a @ IMAGES.T), LABELS),
        [X],
    ),
    "distances in a row": (lambda a: torch.cdist(a, a).amin(2).mean(), [SEQUENCES]),
    "tokens": (lambda a: F.cross_entropy(a.flatten(0, 1), torch.arange(ROWS * 4) % FEATURES), [SEQUENCES]),
    "flat tokens": (lambda a: a.log_softmax(1).unflatten(0, (ROWS, 4)).logsumexp(1).sum(), [SEQUENCES.flatten(0, 1)]),
    "two views": (lambda a: F.cosine_similarity(a[:ROWS], a[ROWS:]).mean(), [torch.cat([X, X + 1])]),
    "pairs": (lambda a: -F.logsigmoid(a[0::2].sum(1) - a[1::2].sum(1)).mean(), [X]),  # they stay together
    "time first": (lambda a: a.sum(0).exp().mean(), [SEQUENCES.movedim(0, 1)]),
    "ctc": (
        lambda a: F.ctc_loss(a.log_softmax(2), torch.ones(ROWS, 2).long(), FOURS, TWOS),
        [SEQUENCES.movedim(0, 1)],
    ),
    "weight decay": (lambda a: F.cross_entropy(a, LABELS) + 0.1 * layers()[0].weight.square().sum().sqrt(), [X]),
    "not of the outputs": (lambda a: layers()[1](X).std(0).sum(), [X]),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_loss_that_is_a_sum_over_rows_is_never_suspected(name: str) -> None:
    loss, inputs = HEALTHY[name]
    assert found(loss, *inputs) is None


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise AssertionError("a custom function may hold anything: it is not run for a check")


def test_custom_functions_and_layers_with_batch_norm_are_left_alone() -> None:
    assert found(lambda a: Custom.apply(a).std(0).sum(), X) is None
    normalise = nn.BatchNorm1d(FEATURES)
    discriminator = nn.Sequential(normalise, nn.Linear(FEATURES, 1))
    assert found(lambda a: F.softplus(-discriminator(a)).mean(), X) is None
    assert normalise.num_batches_tracked == 1


def test_the_check_has_no_side_effects() -> None:
    model = layers()[0]
    calls: list[int] = []
    model.weight.register_hook(lambda gradient: calls.append(1))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(2))
    output, state = model(X), torch.get_rng_state()
    mark_outputs({"scores": [output]}, "test")
    loss = nt_xent(torch.cat([output, output + 1]))
    assert row_dependence(loss, "test", ROWS) == "compared"
    assert model.weight.grad is None
    assert not calls
    assert torch.equal(torch.get_rng_state(), state)
    loss.backward()  # the graph is still there
    assert calls == [1, 2]


def test_nothing_is_said_of_few_rows_or_large_outputs() -> None:
    output = layers()[0](X[:3])
    mark_outputs(output, "test")
    assert row_dependence(output.std(0).sum(), "test", 3) is None
    large = torch.zeros(4, 1 << 24, device="meta", requires_grad=True) * 1
    mark_outputs(large, "test")
    deviation, calls = large.std(0), []
    deviation.register_hook(calls.append)
    assert row_dependence(deviation.sum(), "test", 4) is None
    assert not calls  # nothing has been differentiated
