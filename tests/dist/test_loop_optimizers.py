"""Several optimizers, optimizers for sparse gradients or that cannot work, SAM, and ranks that come apart."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adafactor, AdamW, Muon, SparseAdam

import trimaran
from tests.cases import slow
from tests.ranks import run_ranks
from trimaran.core import UserError

STEPS = 3


class Words(nn.Module):
    """Has a sparse embedding, a matrix and a bias."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(40, 8, sparse=sparse, mode="sum")
        self.out = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.words(tokens))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(40, (7, 3), generator=draw), torch.randint(5, (7,), generator=draw)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def muon_and_adamw(model: Words) -> list[torch.optim.Optimizer]:
    rest = [model.words.weight, model.out.bias]
    assert model.out.bias is not None
    return [Muon([model.out.weight], lr=0.002), AdamW(rest, lr=0.02, eps=1e-3)]


def sparse_and_dense(model: Words) -> list[torch.optim.Optimizer]:
    return [SparseAdam([model.words.weight], lr=0.05), SGD(model.out.parameters(), lr=0.1)]


def plain_weights(make: Callable[[Words], list[torch.optim.Optimizer]], *, sparse: bool, clip: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Words(sparse=sparse)
    optimizers = make(model)
    for step in range(STEPS):
        (loss_of(model, batch_of(step)) / 7).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for each in optimizers:
            each.step()
            each.zero_grad()
    return [each.detach() for each in model.parameters()]


def weights_on_ranks(make: str, sharding: str, sparse: bool, folder: Path | None) -> list[Tensor]:
    """Return the weights after `STEPS` steps, of which the last ones are those of a loop that was resumed."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Words(sparse=sparse)
    optimizers = {"muon": muon_and_adamw, "sparse": sparse_and_dense}[make](model)
    loop = trimaran.prepare(model, optimizers, sharding=sharding)
    start = loop.resume(folder) if folder is not None else 0
    for step in range(start, start + 2 if folder is not None and not start else STEPS):
        rows = loop.local_rows(batch_of(step))
        loop.backward(loss_of(model, rows), num_samples=len(rows[1]), reduction="sum")
        loop.step(clip_norm=0.0 if sparse else 0.1)
    if folder is not None:
        loop.save(folder, 2)
    return list(loop.state_dict().values())


@pytest.mark.parametrize("sharding", [slow("none"), "parameters"])
def test_two_optimizers_train_one_model_and_resume(sharding: str, tmp_path: Path) -> None:
    expected = plain_weights(muon_and_adamw, sparse=False, clip=True)
    run_ranks(2, weights_on_ranks, "muon", sharding, False, tmp_path)
    main, _ = run_ranks(2, weights_on_ranks, "muon", sharding, False, tmp_path)
    for ours, plain in zip(main, expected, strict=True):
        # Muon computes in bf16, so that sharded products round differently.
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5 if sharding == "none" else 7e-4)


@pytest.mark.parametrize("ranks", [1, 3])
def test_sparse_gradients_train_like_the_plain_loop(ranks: int) -> None:
    expected = plain_weights(sparse_and_dense, sparse=True, clip=False)
    main, *_ = run_ranks(ranks, weights_on_ranks, "sparse", "none", True, None)
    for ours, plain in zip(main, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def sharpness_aware(sharding: str) -> list[float]:
    """Return the losses of SAM: the gradient at the weights, then that of weights a step up from there."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Words()
    loop, losses = trimaran.prepare(model, SGD(model.parameters(), lr=0.3), sharding=sharding), []
    for step in range(STEPS):
        rows = loop.local_rows(batch_of(step))
        loop.backward(loss_of(model, rows), num_samples=len(rows[1]), reduction="sum")
        with torch.no_grad():
            norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
            moved = [(each, each.grad * (0.5 / norm)) for each in model.parameters() if each.grad is not None]
            for each, way in moved:
                each.add_(way)
        loop.zero_grad()
        loop.backward(loss_of(model, rows), num_samples=len(rows[1]), reduction="sum")
        with torch.no_grad():
            for each, way in moved:
                each.sub_(way)
        losses.append(float(loop.step().loss))
    return losses


def plain_sharpness_aware() -> list[float]:
    torch.manual_seed(0)
    model = Words()
    optimizer, losses = SGD(model.parameters(), lr=0.3), []
    for step in range(STEPS):
        (loss_of(model, batch_of(step)) / 7).backward()
        with torch.no_grad():
            norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
            moved = [(each, each.grad * (0.5 / norm)) for each in model.parameters() if each.grad is not None]
            for each, way in moved:
                each.add_(way)
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(step)) / 7
        loss.backward()
        with torch.no_grad():
            for each, way in moved:
                each.sub_(way)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("ranks", "sharding"),
    [(1, "none"), (2, "parameters"), *map(slow, [(3, "none"), (2, "optimizer")])],
)
def test_sam_takes_two_gradients_in_a_step(ranks: int, sharding: str) -> None:
    expected = plain_sharpness_aware()
    for losses in run_ranks(ranks, sharpness_aware, sharding):
        assert losses == pytest.approx(expected, rel=1e-5)


def losses_of_two_backwards() -> list[float]:
    """Return the losses of a loop that calls backward for each of two losses, where each counts half of the rows."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Words()
    loop, losses = trimaran.prepare(model, SGD(model.parameters(), lr=0.3)), []
    for step in range(STEPS):
        tokens, labels = loop.local_rows(batch_of(step))
        for part in (slice(None, 1), slice(1, None)):
            loop.backward(loss_of(model, (tokens[part], labels[part])), num_samples=len(labels[part]), reduction="sum")
        losses.append(float(loop.step().loss))
    return losses


def test_several_backwards_in_a_step_add_up() -> None:
    torch.manual_seed(0)
    model = Words()
    optimizer, expected = SGD(model.parameters(), lr=0.3), []
    for step in range(STEPS):
        loss = loss_of(model, batch_of(step)) / 7
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for losses in run_ranks(3, losses_of_two_backwards):
        assert losses == pytest.approx(expected, rel=1e-5)


def nets_of_gan() -> tuple[nn.Module, nn.Module, SGD, SGD]:
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    return generator, critic, SGD(generator.parameters(), lr=0.3), SGD(critic.parameters(), lr=0.3)


def rows_of_gan(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(7, 5, generator=draw), torch.randn(7, 4, generator=draw)


def losses_of_gan(sharding: str) -> list[float]:
    """Return the losses of a GAN, whose generator's backward leaves gradients in the critic. `step` clears the rest."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    generator, critic, optimizer, critics = nets_of_gan()
    loop = trimaran.prepare(generator, optimizer, sharding=sharding)
    other, losses = loop.prepare(critic, critics, sharding=sharding), []
    for step in range(STEPS):
        real, noise = loop.local_rows(rows_of_gan(step))
        fake = generator(noise)
        judged = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        other.backward(judged, num_samples=len(real), reduction="mean")
        losses.append(float(other.step().loss))
        loop.backward(F.softplus(-critic(fake)).mean(), num_samples=len(real), reduction="mean")
        losses.append(float(loop.step().loss))
    return losses


@pytest.mark.parametrize(("ranks", "sharding"), [(1, "none"), slow((2, "none")), (2, "parameters")])
def test_gradients_that_another_loop_has_left_are_dropped(ranks: int, sharding: str) -> None:
    generator, critic, optimizer, critics = nets_of_gan()
    expected = []
    for step in range(STEPS):
        real, noise = rows_of_gan(step)
        fake = generator(noise)
        critics.zero_grad()
        judged = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        judged.backward()
        critics.step()
        optimizer.zero_grad()
        fooled = F.softplus(-critic(fake)).mean()
        fooled.backward()
        optimizer.step()
        expected += [judged.item(), fooled.item()]
    for losses in run_ranks(ranks, losses_of_gan, sharding):
        assert losses == pytest.approx(expected, rel=1e-5)


class LocalOnly(SGD):
    """Works on the memory of its parameters, of which a shard has none of its own."""

    def step(self, closure: Any = None) -> Any:  # pyrefly: ignore[bad-override]
        for each in self.param_groups[0]["params"]:
            each.data.add_(torch.ones(each.shape))


class NeedsClosure(SGD):
    def step(self, closure: Any) -> Any:  # pyrefly: ignore[bad-override]
        return super().step(closure)


def refusals() -> list[str]:
    """Return the errors of what `prepare` and the first steps refuse, on each rank."""
    dist.init_process_group("gloo")
    model, head = Words(), nn.Linear(5, 5)
    both = [*model.parameters(), *head.parameters()]
    again, sparse = Words(), Words(sparse=True)
    trimaran.prepare(again, SGD(again.parameters(), lr=0.1))
    wide = Words() if dist.get_rank() == 0 else nn.Linear(3, 3)

    def detached() -> None:
        net = Words()
        loop = trimaran.prepare(net, SGD(net.parameters(), lr=0.1))
        loop.backward(loss_of(net, loop.local_rows(batch_of(0))).detach(), num_samples=3, reduction="sum")

    def pulled_apart() -> None:
        net = Words()
        loop = trimaran.prepare(net, SGD(net.parameters(), lr=0.1))
        with torch.no_grad():
            net.out.weight.add_(loop.rank)
        loop.backward(loss_of(net, loop.local_rows(batch_of(0))), num_samples=3, reduction="sum")
        loop.step()

    def added_later() -> None:
        net = Words()
        loop = trimaran.prepare(net, SGD(net.parameters(), lr=0.1))
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        loop.backward(loss_of(net, loop.local_rows(batch_of(0))), num_samples=3, reduction="sum")
        loop.step()

    def unsupported() -> None:
        net = Words()
        loop = trimaran.prepare(net, LocalOnly(net.parameters(), lr=0.1), sharding="parameters")
        loop.backward(loss_of(net, loop.local_rows(batch_of(0))), num_samples=3, reduction="sum")
        loop.step()

    def penalty() -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        loop = trimaran.prepare(net, SGD(net.parameters(), lr=0.1), sharding="parameters")
        rows = torch.ones(3, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(net(rows).sum(), rows, create_graph=True)
        loop.backward(slope.square().sum(1).mean(), num_samples=3, reduction="mean")

    messages = []
    for mistake in (
        lambda: trimaran.prepare(model, SGD(both, lr=0.1)),
        lambda: trimaran.prepare(
            model, SGD([{"params": model.parameters()}, {"params": [nn.Parameter(torch.ones(1))]}])
        ),
        lambda: trimaran.prepare(model, torch.optim.LBFGS(model.parameters())),
        lambda: trimaran.prepare(model, NeedsClosure(model.parameters(), lr=0.1)),
        lambda: trimaran.prepare(model, Adafactor(model.parameters()), sharding="optimizer"),
        lambda: trimaran.prepare(model, [SGD(model.parameters(), lr=0.1), SGD(model.out.parameters(), lr=0.1)]),
        lambda: trimaran.prepare(again, SGD(again.parameters(), lr=0.1)),
        lambda: trimaran.prepare(model, []),
        lambda: trimaran.prepare(sparse, SGD(sparse.parameters(), lr=0.1), sharding="parameters"),
        lambda: trimaran.prepare(wide, SGD(wide.parameters(), lr=0.1)),
        detached,
        added_later,
        unsupported,
        penalty,
        pulled_apart,
    ):
        with pytest.raises(UserError) as caught:
            mistake()
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_trained_is_an_error_at_once() -> None:
    for messages in run_ranks(2, refusals):
        codes = [each[:4] for each in messages]
        assert codes == ["P130", "P130", *["P131"] * 6, "P136", "P138", "P133", "P130", "P131", "P136", "P134"]
        assert "number 3 of group 0, of shape [5, 5]" in messages[0]
        assert "number 0 of group 1, of shape [1]" in messages[1]
        assert "words.weight" in messages[9]
        assert "after step 1 the ranks hold different weights: out.weight" in messages[-1]


class Codebook(nn.Module):
    """Keeps a running mean of its rows, as a VQ-VAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("mean").lerp_(x.detach().mean(0), 0.1)
        return self.norm(self.lin(x))


def warnings_of_buffers() -> list[str]:
    dist.init_process_group("gloo")
    model = Codebook()
    loop = trimaran.prepare(model, SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            rows = loop.local_rows(torch.arange(16.0).reshape(4, 4))
            loop.backward(model(rows).square().sum(), num_samples=2)
            loop.step()
    return [str(each.message) for each in caught if "buffers" in str(each.message)]


def test_buffers_that_differ_are_named_once() -> None:
    main, other = run_ranks(2, warnings_of_buffers)
    assert len(main) == 1
    assert main[0].startswith("P135: after step 1 the ranks hold different buffers: mean. ")
    assert other == []
