"""`loop.gather`: a contrastive loop on several ranks trains as in one process."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import trimaran
from tests.ranks import run_ranks
from trimaran.core import UserError

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "own-loop.md"
SIZES = (8, 7, 2, 8)  # on three ranks, two rows leave one rank without


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.images = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 5))
        self.texts = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 5))
        self.scale = nn.Parameter(torch.tensor([1.0]))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.images(images), dim=1), F.normalize(self.texts(texts), dim=1), self.scale.exp()


def code_of_guide() -> str:
    section = GUIDE.read_text().split("## Losses over the whole batch")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(SIZES[step], 6, generator=draw), torch.randn(SIZES[step], 4, generator=draw)


def gradient_norm(model: nn.Module) -> float:
    return nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]).item()


def train_plain() -> list[float]:
    model, numbers = Clip(), []
    names: dict[str, Any] = {"torch": torch, "F": F, "STEPS": 0}
    exec(code_of_guide(), names)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(len(SIZES)):
        loss = names["contrast"](*model(*batch_of(step)))
        loss.backward()
        numbers += [loss.item(), gradient_norm(model)]
        optimizer.step()
        optimizer.zero_grad()
    return numbers


def train_gathered(sharding: str) -> dict[str, Any]:
    """Return the losses of the guide's loop, and the losses and norms of one that counts the rank's own rows."""
    dist.init_process_group("gloo")
    model, lines = Clip(), []
    loop = trimaran.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), sharding=sharding)
    names = {"torch": torch, "F": F, "STEPS": len(SIZES), "get_batch": batch_of, "model": model, "loop": loop}
    exec(code_of_guide(), names | {"print": lines.append})
    numbers: dict[str, Any] = {"guide": [float(line.split()[-1]) for line in lines], "own": []}
    model = Clip()
    loop = trimaran.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), sharding=sharding)
    for step in range(len(SIZES)):
        images, texts, scale = model(*loop.local_rows(batch_of(step)))
        all_images, all_texts = loop.gather(images), loop.gather(texts)
        counts = [len(part) for part in torch.arange(SIZES[step]).tensor_split(loop.world_size)]
        labels = sum(counts[: loop.rank]) + torch.arange(len(images))
        labels = labels.clamp(max=len(all_images) - 1)  # of a copy on a rank without rows
        scores = scale * images @ all_texts.T, scale * texts @ all_images.T
        loss = torch.stack([F.cross_entropy(each, labels, reduction="sum") for each in scores]).sum() / 2
        loop.backward(loss, num_samples=len(images), reduction="sum")
        result = loop.step()
        numbers["own"] += [float(result.loss), float(result.grad_norm)]
    with torch.no_grad():
        gathered = loop.gather(torch.full((loop.rank, 2), float(loop.rank)))
    numbers["uneven"] = gathered[:, 0].tolist()
    columns = loop.gather(torch.full((2, loop.rank + 1), float(loop.rank)), dim=1)
    numbers["columns"] = columns[0].tolist()
    return numbers


@pytest.mark.parametrize(
    ("ranks", "sharding"),
    [
        (1, "none"),
        (2, "parameters"),
        (3, "none"),
    ],
)
def test_a_contrastive_loop_trains_as_in_one_process(ranks: int, sharding: str) -> None:
    expected = train_plain()
    answers = run_ranks(ranks, train_gathered, sharding)
    assert answers[0]["guide"] == pytest.approx(expected[::2], rel=1e-4)
    for numbers in answers:
        assert numbers["own"] == pytest.approx(expected, rel=1e-4)
        assert numbers["uneven"] == [rank for rank in range(ranks) for _ in range(rank)]
        assert numbers["columns"] == [rank for rank in range(ranks) for _ in range(rank + 1)]


def gather_different_shapes() -> list[str]:
    dist.init_process_group("gloo")
    model = nn.Linear(2, 2)
    loop, found = trimaran.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)), []
    for rows, dim in ((torch.ones(2, 3 + loop.rank), 0), (torch.ones(2, 3), 2), (torch.ones(()), 0)):
        with pytest.raises(UserError) as caught:
            loop.gather(rows, dim=dim)
        found.append(f"{caught.value.code}: {caught.value.what}")
    return found


def test_rows_of_different_shapes_are_refused_on_all_ranks() -> None:
    for shapes, no_dim, scalar in run_ranks(2, gather_different_shapes):
        assert shapes.startswith(
            "P146: the rows of the ranks differ in shape or type: rank 0 has rows of torch.float32"
        )
        assert no_dim == "P146: a tensor of shape [2, 3] has no dimension 2 with rows"
        assert scalar.startswith("P146: a tensor of shape []")
