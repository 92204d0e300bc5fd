"""A user's own model, cut by `trimaran.prepare(plan=...)`, trains as in one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import trimaran
from tests.cases import slow
from tests.ranks import run_ranks
from trimaran.core import UserError
from trimaran.train import join_process_group, read_rank_info

STEPS, ROWS, LENGTH, VOCAB, WIDTH, HEADS = 3, 8, 6, 20, 16, 4
TENSOR = {"*.qkv": "columns-gathered", "*.out": "rows-of-whole", "*.up": "columns", "*.down": "rows"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH),
        )  # a key bias has no gradient
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(LENGTH)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Skipping(Model):
    """Adds the first block's result to the last one's."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.blocks[0](self.tokens(tokens))
        for block in [*self.blocks][1:]:
            x = block(x)
        return self.head(self.norm(x + first))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def forward_of(model: nn.Module) -> Any:
    def forward(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"), y.numel()

    return forward


def split(model: nn.Module, plan: dict[str, Any], tensor: dict[str, str] | None = None) -> trimaran.SplitLoop:
    if not dist.is_initialized():
        join_process_group(read_rank_info(os.environ))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return trimaran.prepare(model, optimizer, plan=plan, forward=forward_of(model), example=batch_of(0), tensor=tensor)


def trained(plan: dict[str, Any], tensor: Any, tied: bool, folder: Path | None = None, start: int = 0) -> Any:
    """Return losses and norms of the steps, the evaluated loss and the final weights; save after the second step."""
    torch.manual_seed(0)
    loop = split(Model(tied=tied), plan, tensor)
    if start:
        assert folder is not None
        assert loop.resume(folder) == start
    numbers = []
    for step in range(start, STEPS):
        result = loop.train_step(batch_of(step), clip_norm=0.5)
        numbers.append((float(result.loss), float(result.grad_norm), float(result.num_tokens)))
        if folder is not None and step == 1 and not start:
            loop.save(folder, step + 1)
    loss = loop.evaluate([batch_of(9)])
    return numbers, loss, {name: each.numpy() for name, each in loop.state_dict().items()}


def alone(tied: bool) -> Any:
    torch.manual_seed(0)
    model = Model(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = []
    for step in range(STEPS):
        loss, count = forward_of(model)(batch_of(step))
        (loss / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((float(loss.detach() / count), float(norm), float(count)))
    loss, count = forward_of(model)(batch_of(9))
    return numbers, float(loss.detach() / count), {name: each.numpy() for name, each in model.state_dict().items()}


def assert_same(found: Any, expected: Any, *, start: int = 0) -> None:
    assert found[0] == [pytest.approx(each, rel=1e-4) for each in expected[0][start:]]
    assert found[1] == pytest.approx(expected[1], rel=1e-4)
    named = {name: each for name, each in expected[2].items() if name in found[2]}
    assert len(found[2]) >= len(expected[2]) - 1  # a tied head has one name
    for name, each in named.items():
        assert found[2][name] == pytest.approx(each, abs=2e-4), name


PLANS: list[Any] = [
    slow((4, {"pp": 2, "tp": 2, "grad_accum": 4, "pipeline": {"schedule": "gpipe"}}, TENSOR, False)),  # each alone here
    (2, {"tp": 2}, TENSOR, True),
    slow((4, {"mesh": {"pp": 2, "dp_replicate": 2}, "pipeline": {"stages": [3, 1]}}, None, True)),
    (2, {"pp": 2, "pipeline": {"stages": [3, 1]}}, None, True),
    (3, {"pp": 3, "grad_accum": 4}, None, True),
]


@pytest.mark.parametrize(("ranks", "plan", "tensor", "tied"), PLANS, ids=str)
def test_a_split_model_trains_as_in_one_process(ranks: int, plan: Any, tensor: Any, tied: bool) -> None:
    expected = alone(tied)
    main, *others = run_ranks(ranks, trained, plan, tensor, tied)
    assert_same(main, expected)
    for numbers, loss, weights in others:
        assert (numbers, loss, weights) == (main[0], main[1], {})


def test_a_checkpoint_loads_under_another_plan(tmp_path: Path) -> None:
    expected = alone(False)
    run_ranks(2, trained, {"pp": 2}, None, False, tmp_path)
    main, _ = run_ranks(2, trained, {"tp": 2}, TENSOR, False, tmp_path, 2)
    assert_same(main, expected, start=2)


REFUSED: list[tuple[str, dict[str, Any], dict[str, str] | None, str, str]] = [
    ("flat", {"pp": 2}, None, "P103", "has no nn.ModuleList"),
    ("skipping", {"pp": 2}, None, "P103", "blocks.0"),
    ("model", {"cp": 2}, None, "P103", "cp does not split"),
    ("model", {"pp": 2, "grad_accum": 1}, None, "P103", "1 micro-batches"),
    ("model", {"tp": 2}, None, "P104", "names 0 layers"),
    ("model", {"tp": 2}, {"*.gate": "columns"}, "P104", "*.gate matches no module"),
    ("model", {"tp": 2}, {"*.up": "diagonals"}, "P104", "'diagonals'"),
    ("model", {"tp": 2}, {"norm": "columns"}, "P104", "LayerNorm"),
    ("model", {"tp": 2}, {"*.up": "columns", "*.down": "rows", "*.qkv": "columns"}, "P105", ""),
    ("model", {"tp": 2}, {"*.up": "columns-gathered", "*.down": "rows"}, "P105", ""),
]


def refusals() -> list[tuple[str, str]]:
    found = []
    for name, plan, tensor, _, _ in REFUSED:
        torch.manual_seed(0)
        kinds: dict[str, nn.Module] = {
            "model": Model(tied=False),
            "skipping": Skipping(tied=False),
            "flat": nn.Sequential(nn.Embedding(VOCAB, VOCAB)),
        }
        with pytest.raises(UserError) as error:
            split(kinds[name], plan, tensor)
        found.append((error.value.code, error.value.what))
    return found


def test_a_plan_that_does_not_fit_is_refused() -> None:
    for found in run_ranks(2, refusals):
        for (code, what), (*_, expected, text) in zip(found, REFUSED, strict=True):
            assert (code, text in what) == (expected, True), what
