"""Losses and gradients of a user's own loop that would train something else than one process are errors at once."""

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import trimaran
from tests.cases import slow
from tests.ranks import run_ranks
from trimaran import Loop
from trimaran.core import UserError

DRAW = torch.Generator().manual_seed(0)
X, IMAGES = torch.randn(11, 4, generator=DRAW), torch.randn(11, 4, generator=DRAW)
LABELS = torch.arange(11) % 4
IGNORED = LABELS.masked_fill(torch.arange(11) == 10, -100)  # on the last rank only
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0])


def build(sharding: str = "none", **options: Any) -> Loop:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    return trimaran.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), sharding=sharding, **options)


def code_of(run: Callable[[], Any]) -> str:
    """Return the code of the error or of the warnings of `run`; "" if there are none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run()
        except UserError as error:
            return error.code
    return " ".join(str(each.message)[:4] for each in caught if str(each.message)[:2] == "P1")


def mean(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def contrast(out: Tensor, y: Tensor) -> Tensor:
    scores = F.normalize(out, dim=1) @ F.normalize(out + 1, dim=1).T
    return F.cross_entropy(scores, torch.arange(len(out)))


def whitened(out: Tensor, y: Tensor) -> Tensor:
    return ((out - out.mean(0)) / out.std(0)).pow(4).mean() + F.cross_entropy(out, y)


def weighted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, weight=WEIGHT)


def some_elements(out: Tensor, y: Tensor) -> Tensor:
    return out.square()[1:, :3].mean()


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, str]] = {
    "mean": (mean, LABELS, ""),
    "smoothed": (lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1), LABELS, ""),
    "penalty": (lambda out, y: F.cross_entropy(out, y) + 0.1 * X[:3, :3].clone().requires_grad_().mean(), LABELS, ""),
    "tokens": (
        lambda out, y: F.cross_entropy(out.view(-1, 2), (y[:, None] > 1).long().repeat(1, 2).flatten()),
        LABELS,
        "",
    ),
    "contrast": (contrast, LABELS, "P140"),
    "root": (lambda out, y: F.mse_loss(out, out.detach() + 1).sqrt(), LABELS, "P140"),
    "whitened": (whitened, LABELS, "P140"),
    "weighted": (weighted, LABELS, "P143"),
    "ignored": (mean, IGNORED, "P143"),
    "ignored and smoothed": (lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1), IGNORED, "P143"),
    "some elements": (some_elements, LABELS, "P143"),
}


def codes_of_losses(sharding: str) -> dict[str, list[str]]:
    """Return the code of each loss, with the check and without it, and in micro-batches."""
    codes = {}
    for name, (loss, labels, _) in LOSSES.items():
        codes[name] = []
        for options in ({}, {"check_loss": False}):
            loop = build(sharding, **options)

            def step(loop: Loop = loop, loss: Any = loss, labels: Tensor = labels) -> None:
                x, y = loop.local_rows((X, labels))
                loop.backward(loss(loop.model(x), y), num_samples=len(y), reduction="mean")
                loop.step()

            codes[name].append(code_of(step))
    return codes


@pytest.mark.parametrize(
    ("ranks", "sharding"),
    [(1, "none"), (2, "none"), slow((2, "parameters"))],
)
def test_a_loss_that_cannot_be_split_is_an_error_on_all_ranks(ranks: int, sharding: str) -> None:
    expected = {name: [code if ranks > 1 else "", ""] for name, (_, _, code) in LOSSES.items()}
    assert run_ranks(ranks, codes_of_losses, sharding) == [expected] * ranks


def codes_of_parts(sharding: str) -> list[str]:
    """Return the codes of a contrastive loop that calls layer by layer, and of a healthy one."""
    codes = []
    for loss in (contrast, mean):
        loop = build(sharding)

        def step(loop: Loop = loop, loss: Any = loss) -> None:
            x, y = loop.local_rows((X, LABELS))
            for layer in loop.model.children():
                x = layer(x)
            loop.backward(loss(x, y), num_samples=len(y), reduction="mean")
            loop.step()

        codes.append(code_of(step))
    return codes


@pytest.mark.parametrize("sharding", ["none", "parameters"])
def test_scores_of_all_pairs_are_found_if_the_loop_calls_parts_of_the_model(sharding: str) -> None:
    assert run_ranks(2, codes_of_parts, sharding) == [["P140", ""]] * 2


def messages_of_losses() -> list[str]:
    messages = []
    for name in ("contrast", "whitened", "weighted", "ignored"):
        loop = build()
        loss, labels, _ = LOSSES[name]
        x, y = loop.local_rows((X, labels))
        loop.backward(loss(loop.model(x), y), num_samples=len(y), reduction="mean")
        with pytest.raises(UserError) as caught:
            loop.step()
        messages.append(str(caught.value))
    return messages


def test_the_errors_say_what_to_write() -> None:
    first, second = run_ranks(2, messages_of_losses)
    assert "compares or combines the 6 rows of one of 2 ranks, not those of the whole batch" in first[0]
    assert "outputs = loop.gather(outputs)" in first[0]
    assert "prepare(..., check_loss=False) turns this check off" in first[0]
    assert "this loss normalises over the 6 rows" in first[1]
    assert 'num_samples=weight[labels[labels != -100]].sum(), reduction="mean")' in first[2]
    assert "loop.backward(loss(loop.model(x), y), num_samples=len(y)" in first[2]
    assert "the loss was divided by 4, the labels that are not ignored" in second[3]
    assert "told that it is the mean of 5" in second[3]
    assert "(on rank 1)" in first[3]


def train_with_counts() -> list[tuple[float, float]]:
    """Return losses and norms of class weights and of ignored labels, with the lines of the errors."""
    numbers = []
    counts = {"weighted": lambda y: WEIGHT[y[y != -100]].sum(), "ignored": lambda y: (y != -100).sum()}
    for name, count in counts.items():
        loss, labels, _ = LOSSES[name]
        labels = labels if name == "weighted" else labels.masked_fill(torch.arange(11) > 6, -100)
        loop = build()
        for size in (11, 1):  # of the last micro-batches, all labels are ignored
            for x, y in loop.micro_batches((X, labels), size=size):
                loop.backward(loss(loop.model(x), y), num_samples=count(y), reduction="mean")
            result = loop.step()
            numbers.append((float(result.loss), float(result.grad_norm)))
    small = build()
    x, y = small.local_rows((X, LABELS))
    loss = F.cross_entropy(small.model(x), y, weight=WEIGHT * 1e-3)
    small.backward(loss, num_samples=(WEIGHT[y] * 1e-3).sum(), reduction="mean")  # less than one in all
    result = small.step()
    return [*numbers, (float(result.loss), float(result.grad_norm))]


def test_class_weights_and_ignored_labels_train_as_in_one_process() -> None:
    (expected,) = run_ranks(1, train_with_counts)
    assert all(loss == loss for loss, _ in expected)
    assert expected[4] == pytest.approx(expected[0], rel=1e-4)
    for ranks in (2, 3):
        for numbers in run_ranks(ranks, train_with_counts):
            for ours, theirs in zip(numbers, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4)


def codes_of_micro_batches() -> list[str]:
    def steps(loss: Any, *, size: int) -> Callable[[], None]:
        loop = build()

        def run() -> None:
            for x, y in loop.micro_batches((X, LABELS), size=size):
                loop.backward(loss(loop.model(x), y), num_samples=len(y), reduction="mean")
            loop.step()

        return run

    codes = [code_of(steps(contrast, size=size)) for size in (11, 4)] + [code_of(steps(mean, size=4))]
    for size in (11, 4):
        loop = build()

        def run(loop: Loop = loop, size: int = size) -> None:
            for x, y in loop.micro_batches((X, LABELS), size=size):
                loop.backward(contrast(loop.gather(loop.model(x)), y), num_samples=len(y), reduction="mean")
            loop.step()

        codes.append(code_of(run))
    return codes


def test_micro_batches_split_a_loss_too() -> None:
    assert run_ranks(1, codes_of_micro_batches) == [["", "P140", "", "", "P140"]]
    assert run_ranks(2, codes_of_micro_batches) == [["P140", "P140", "", "", "P140"]] * 2


def weight_of(loop: Loop) -> Any:
    return next(loop.model.parameters())


GRADIENTS: dict[str, tuple[Callable[[Loop, tuple[Tensor, Tensor]], Any], str]] = {
    "nothing": (lambda loop, batch: None, ""),
    "norm is read": (lambda loop, batch: weight_of(loop).grad.norm(), ""),
    "some are removed": (lambda loop, batch: setattr(weight_of(loop), "grad", None), ""),
    "clip": (lambda loop, batch: nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0), "P141"),
    "clip values": (lambda loop, batch: nn.utils.clip_grad_value_(loop.model.parameters(), 0.1), "P141"),
    "add": (lambda loop, batch: weight_of(loop).grad.add_(weight_of(loop).detach()), "P141"),
    "replace": (lambda loop, batch: setattr(weight_of(loop), "grad", weight_of(loop).grad * 2), "P141"),
    "zero": (lambda loop, batch: loop.optimizer.zero_grad(set_to_none=False), "P141"),
    "all are removed": (lambda loop, batch: loop.optimizer.zero_grad(), "P141"),
    "data": (lambda loop, batch: weight_of(loop).grad.data.clamp_(-0.1, 0.1), "P141"),
    "a second backward": (lambda loop, batch: mean(loop.model(batch[0]), batch[1]).backward(), "P141"),
    "optimizer.step": (lambda loop, batch: loop.optimizer.step(), "P142"),
}


def codes_of_gradients(sharding: str) -> dict[str, str]:
    codes = {}
    for name, (change, _) in GRADIENTS.items():
        loop = build(sharding)
        scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)

        def steps(loop: Loop = loop, change: Any = change, scheduler: Any = scheduler) -> None:
            for _ in range(2):
                for x, y in loop.micro_batches((X, LABELS), size=3):
                    loop.backward(mean(loop.model(x), y), num_samples=len(y), reduction="mean")
                change(loop, (x, y))
                loop.step(clip_norm=1.0)
                scheduler.step()

        codes[name] = code_of(steps)
    return codes


@pytest.mark.parametrize(("ranks", "sharding"), [(1, "none"), slow((2, "none")), (2, "parameters")])
def test_gradients_that_are_changed_before_the_step_are_an_error(ranks: int, sharding: str) -> None:
    left_out = {"a second backward"} if sharding == "parameters" else set()
    expected = {name: code for name, (_, code) in GRADIENTS.items() if name not in left_out}
    for codes in run_ranks(ranks, codes_of_gradients, sharding):
        assert {name: code for name, code in codes.items() if name not in left_out} == expected


def loops_that_were_not_converted() -> list[str]:
    def backward_kept(loop: Loop) -> None:
        x, y = loop.local_rows((X, LABELS))
        mean(loop.model(x), y).backward()
        loop.step()

    def both_kept(loop: Loop) -> None:
        x, y = loop.local_rows((X, LABELS))
        mean(loop.model(x), y).backward()
        loop.optimizer.step()

    def backward_before(loop: Loop) -> None:
        x, y = loop.local_rows((X, LABELS))
        mean(loop.model(x), y).backward()
        loop.backward(mean(loop.model(x), y), num_samples=len(y), reduction="mean")
        loop.step()

    def divided(loop: Loop, by: int) -> None:
        for number in range(3):
            x, y = loop.local_rows((X, LABELS), last=number == 2)
            loop.backward(mean(loop.model(x), y) / by, num_samples=len(y), reduction="mean")
        loop.step()

    def two_losses(loop: Loop) -> None:
        for number in range(2):
            x, y = loop.local_rows((X, LABELS), last=number == 1)
            out = loop.model(x)
            loop.backward((mean(out, y) + out.square().mean()) / 2, num_samples=len(y), reduction="mean")
        loop.step()

    def hook(loop: Loop) -> None:
        weight_of(loop).register_hook(lambda gradient: gradient.clamp(-1, 1))
        x, y = loop.local_rows((X, LABELS))
        loop.backward(mean(loop.model(x), y), num_samples=len(y), reduction="mean")
        loop.step()

    def no_gradients(loop: Loop) -> None:
        loop.optimizer.step()  # as when states are made to be loaded

    runs: list[Callable[[Loop], None]] = [backward_kept, both_kept, lambda loop: divided(loop, 3)]
    runs += [lambda loop: divided(loop, 3 * loop.world_size)]  # as many as one process would have
    runs += [backward_before, lambda loop: divided(loop, 5), two_losses, hook, no_gradients]
    return [code_of(lambda run=run: run(build())) for run in runs]


def test_lines_of_the_plain_loop_that_were_kept_are_found() -> None:
    expected = ["P142", "P142", "P144", "P144", "P142", "", "", "P148", ""]
    for ranks in (1, 2):
        assert run_ranks(ranks, loops_that_were_not_converted) == [expected] * ranks


def decay_and_clamp(model: nn.Module) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad.add_(each.detach(), alpha=0.1).clamp_(-0.05, 0.05)


def train_with_changed_gradients(sharding: str) -> list[float]:
    """Return norms with decay that is added to gradients and values that are clipped, in `before_update`."""
    loop, numbers = build(sharding), []

    def change() -> None:
        decay_and_clamp(loop.model)

    for _ in range(3):
        for x, y in loop.micro_batches((X, LABELS), size=2):
            loop.backward(mean(loop.model(x), y), num_samples=len(y), reduction="mean")
        numbers.append(float(loop.step(before_update=change).grad_norm))
    return numbers


def test_before_update_gets_the_gradient_of_one_process() -> None:
    torch.manual_seed(0)
    model, expected = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        mean(model(X), LABELS).backward()
        decay_and_clamp(model)
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        expected.append(nn.utils.get_total_norm(gradients).item())
        optimizer.step()
        optimizer.zero_grad()
    for ranks, sharding in ((1, "none"), (2, "parameters")):
        for norms in run_ranks(ranks, train_with_changed_gradients, sharding):
            assert norms == pytest.approx(expected, rel=1e-4)


class Translator(nn.Module):
    """A sequence-first model: tokens of [sequence, rows], and lengths of [rows]."""

    def __init__(self, kind: str, *, batch_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 8)
        self.kind, self.batch_first = kind, batch_first
        self.mix: nn.Module = nn.LSTM(8, 8, batch_first=batch_first)
        if kind == "transformer":
            self.mix = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(8, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.mix(self.embed(tokens))
        return self.head(mixed if self.kind == "transformer" else mixed[0])


TOKENS, NEXT = (torch.randint(9, (5, 7), generator=DRAW) for _ in range(2))


def train_translator(kind: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, batch_first, batch_dim in (("cut", False, 0), ("fixed", False, 1), ("rows first", True, 0)):
        model = Translator(kind, batch_first=batch_first)
        loop = trimaran.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        batch = {"tokens": TOKENS, "next": NEXT} if not batch_first else {"tokens": TOKENS.T, "next": NEXT.T}
        losses: list[float] = []

        def steps(loop: Loop = loop, batch: Any = batch, batch_dim: int = batch_dim, losses: Any = losses) -> None:
            for size in (7, 2):
                for rows in loop.micro_batches(batch, size=size, batch_dim=batch_dim):
                    loss = F.cross_entropy(loop.model(rows["tokens"]).flatten(0, 1), rows["next"].flatten())
                    loop.backward(loss, num_tokens=rows["next"].numel(), reduction="mean")
                losses.append(float(loop.step().loss))

        found[name] = [code_of(steps), losses]
    return found


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_a_sequence_first_batch_is_refused_and_batch_dim_makes_it_right(kind: str) -> None:
    (expected,) = run_ranks(1, train_translator, kind)
    assert expected["fixed"][0] == expected["rows first"][0] == ""
    assert expected["rows first"][1] == pytest.approx(expected["fixed"][1], rel=1e-4)
    for found in run_ranks(2, train_translator, kind):
        assert found["cut"] == ["P145", []]
        assert found["fixed"] == ["", pytest.approx(expected["fixed"][1], rel=1e-4)]
        assert found["rows first"][0] == ""


def noises() -> list[str]:
    """Return the warnings of a model that draws random numbers, with and without a seed per rank."""
    codes = []
    for seeded, rate in ((False, 0.5), (True, 0.5), (False, 0.0)):
        torch.manual_seed(0)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(rate), nn.Linear(8, 4))
        if not rate:
            del model[1]
        loop = trimaran.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if seeded:
            trimaran.seed_rank(0)

        def steps(loop: Loop = loop) -> None:
            for _ in range(3):
                batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
                (x,) = loop.local_rows((batch,))
                loss = loop.model(x).square().sum()
                torch.randn(1)  # the next batch, drawn early
                loop.backward(loss, num_samples=len(x))
                loop.step()

        codes.append(code_of(steps))
    return codes


def test_the_same_noise_on_all_ranks_is_warned_of_once() -> None:
    assert run_ranks(1, noises) == [["", "", ""]]
    assert run_ranks(2, noises) == [["P147", "", ""], ["", "", ""]]


def split_batches() -> dict[str, Any]:
    loop, found = build(), {}
    texts = [f"text {number}" for number in range(5)]
    rows = loop.local_rows({"x": X[:5], "texts": texts, "ids": [0, 1, 2, 3, 4], "size": (32, 32), "names": ()})
    found["texts"] = rows["texts"], rows["ids"], rows["size"]
    found["only texts"] = loop.local_rows(texts)
    found["micro"] = [each["t"] for each in loop.micro_batches({"x": X[:5], "t": texts}, size=1)]
    lengths = loop.local_rows((torch.zeros(3, 5, 2), torch.arange(5)), batch_dim=1)
    found["second"] = [list(each.shape) for each in lengths]
    for name, batch in (
        ("12 texts", {"x": X[:6], "texts": [str(number) for number in range(12)]}),
        ("sequences", (torch.zeros(4, 6), torch.zeros(5, 6))),
        ("lengths", (torch.zeros(4, 6), torch.zeros(6))),
        ("none", (torch.zeros(4, 6), torch.zeros(5))),
    ):
        with pytest.raises(UserError) as caught:
            loop.local_rows(batch)
        found[name] = f"{caught.value.code}: {caught.value.what}; {caught.value.fix}"
    return found


def test_texts_are_split_with_the_rows_and_other_lengths_are_refused() -> None:
    first, second = run_ranks(2, split_batches)
    assert first["texts"] == (["text 0", "text 1", "text 2"], [0, 1, 2], (32, 32))
    assert second["texts"] == (["text 3", "text 4"], [3, 4], (32, 32))
    assert first["only texts"] + second["only texts"] == [f"text {number}" for number in range(5)]
    assert first["micro"][0] + second["micro"][0] == ["text 0", "text 1"]
    assert second["second"] == [[3, 2, 2], [2]]
    assert first["12 texts"].startswith("P040: this global batch has lists of 12 texts beside tensors of 6 rows")
    assert "pass batch_dim=1" in first["sequences"]
    assert "pass batch_dim=1" in first["lengths"]
    assert "batch_dim" not in first["none"]


class Pairs(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return TOKENS[:, index % 7], index


def stack_columns(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([each for each, _ in samples], dim=1), torch.tensor([number for _, number in samples])


def load_columns() -> list[list[int]]:
    loop, found = build(), []
    data = torch.utils.data.DataLoader(Pairs(), batch_size=7, collate_fn=stack_columns)
    for batch in loop.loader(data, batch_dim=1):
        for tokens, numbers in loop.micro_batches(batch, size=2):
            assert torch.equal(tokens, TOKENS[:, numbers % 7])
            found.append([] if loop.is_padding else numbers.tolist())
    return found


def test_a_loader_of_sequence_first_batches_is_split_by_rows() -> None:
    first, second = run_ranks(2, load_columns)
    assert first == [[0, 1], [2, 3], [7, 8], [9, 10]]
    assert second == [[4, 5], [6], [11, 12], [13]]


def healthy_models(sharding: str) -> list[str]:
    """Return the codes of loops that must not be disturbed: a GAN, a compiled loss, copies, evaluation."""
    loop, codes = build(sharding), []

    def gan() -> None:
        discriminator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of BatchNorm
            other = loop.prepare(discriminator, torch.optim.SGD(discriminator.parameters(), lr=0.1))
            for _ in range(2):
                (x,) = loop.local_rows((X,))
                fake = loop.model(x)
                real_loss = F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fake.detach())).mean()
                other.backward(real_loss, num_samples=len(x), reduction="mean")
                other.step()
                loop.backward(F.softplus(-discriminator(fake)).mean(), num_samples=len(x), reduction="mean")
                loop.step()
                other.optimizer.zero_grad()

    def unrolled() -> None:
        (x,) = loop.local_rows((X,))
        state = x
        for _ in range(3):
            state = loop.model(state)
        loop.backward(state.square().sum(), num_samples=len(x))
        loop.step()

    codes += [code_of(gan), code_of(unrolled)]
    if sharding == "none":
        model = build().model
        copied = copy.deepcopy(model)
        pickled = io.BytesIO()
        torch.save(model, pickled)
        assert torch.equal(copied(X), model(X))
    return codes


@pytest.mark.parametrize("sharding", ["none", "parameters"])
def test_healthy_loops_are_not_disturbed(sharding: str) -> None:
    assert run_ranks(2, healthy_models, sharding) == [["", ""]] * 2


def own_batches(rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from ((X[rank::2], LABELS[rank::2]) for _ in range(2 + rank))


def train_on_own_batches() -> list[str]:
    codes = []
    for loss in (mean, contrast):
        loop = build()

        def steps(loop: Loop = loop, loss: Any = loss) -> None:
            for x, y in loop.uneven_batches(own_batches(loop.rank)):
                loop.backward(loss(loop.model(x), y), num_samples=len(y), reduction="mean")
                loop.step()

        codes.append(code_of(steps))
    return codes


def test_batches_of_each_rank_are_checked_too() -> None:
    assert run_ranks(2, train_on_own_batches) == [["", "P140"]] * 2
