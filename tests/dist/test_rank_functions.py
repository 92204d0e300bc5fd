"""The small functions for a loop of one's own, on real ranks, and as the guide shows them."""

import io
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

import trimaran
from tests.ranks import run_ranks
from trimaran.core import UserError

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "own-loop.md"
SECTION = "## Small functions"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = Block(32), nn.ModuleDict({"a": Block(32), "b": Block(8)})
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks["b"](self.blocks["a"](self.first(x))))


def join() -> int:
    dist.init_process_group("gloo")
    return dist.get_rank()


def gathered() -> list[Any]:
    rank = join()
    metrics = {"loss": torch.tensor(1.0 + rank), "accuracy": 0.25}
    weighted = trimaran.gather_metrics(metrics, weight=3 - 2 * rank)
    others = [trimaran.gather_metrics(metrics, reduce=each)["loss"] for each in ("sum", "max", "min", "list")]
    wrong = []
    for call in (
        lambda: trimaran.gather_metrics({"loss": 1.0} if rank else {"los": 1.0}),
        lambda: trimaran.gather_metrics(metrics, reduce="median"),  # type: ignore[call-overload]
    ):
        with pytest.raises(UserError) as error:
            call()
        wrong.append(error.value.what)
    return [weighted, others, wrong]


def test_metrics_are_gathered_over_ranks() -> None:
    (first, second) = run_ranks(2, gathered)
    assert first == second
    weighted, others, wrong = first
    assert weighted == {"loss": pytest.approx((3 * 1.0 + 1 * 2.0) / 4), "accuracy": 0.25}
    assert others == [3.0, 2.0, 1.0, [1.0, 2.0]]
    assert wrong == ["rank 0 has the metrics los, and rank 1 loss", "reduce='median' is not a way to reduce metrics"]


def printed() -> str:
    rank, out = join(), io.StringIO()
    trimaran.print_in_order("rank", rank, "of", dist.get_world_size(), file=out)
    trimaran.print_in_order(*(["only rank 1"] if rank else []), file=out)
    return out.getvalue()


def test_lines_are_printed_in_the_order_of_ranks() -> None:
    assert run_ranks(3, printed) == ["rank 0 of 3\nrank 1 of 3\nrank 2 of 3\nonly rank 1\nonly rank 1\n", "", ""]


def seeded() -> list[float]:
    join()
    own = trimaran.seed_rank(7)
    first = [float(torch.rand(())), float(np.random.rand()), random.random()]
    assert trimaran.seed_rank(7) == own
    assert [float(torch.rand(())), float(np.random.rand()), random.random()] == first
    assert trimaran.seed_rank(8) != own
    return [own, *first]


def test_every_rank_has_its_own_seed() -> None:
    first, second = run_ranks(2, seeded)
    assert all(ours != theirs for ours, theirs in zip(first, second, strict=True))


def test_one_process_needs_no_group() -> None:
    assert trimaran.gather_metrics({"loss": 2.0}) == {"loss": 2.0}
    out = io.StringIO()
    trimaran.print_in_order("alone", file=out)
    assert out.getvalue() == "alone\n"


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.4), ("sqrt", 0.2)])
def test_the_learning_rate_follows_the_batch(rule: Any, expected: float) -> None:
    assert trimaran.scale_lr(0.1, batch=256, new_batch=1024, rule=rule) == pytest.approx(expected)
    assert trimaran.scale_lr(expected, batch=1024, new_batch=256, rule=rule) == pytest.approx(0.1)


def test_wrong_rules_and_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="K082: rule='cubic' is not a rule"):
        trimaran.scale_lr(0.1, batch=1, new_batch=2, rule="cubic")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="K082"):
        trimaran.scale_lr(0.1, batch=0, new_batch=2, rule="linear")


def train(wrap: Any, file: Path | None) -> list[Any]:
    """Return the losses, and the names of the modules that are gathered one at a time."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sharding = "none" if wrap is None else "parameters"
    loop = trimaran.prepare(model, optimizer, sharding=sharding, wrap=wrap)
    losses = []
    for step in range(3):
        source = torch.Generator().manual_seed(step)
        x, y = loop.local_rows((torch.randn(8, 8, generator=source), torch.randint(4, (8,), generator=source)))
        loss = F.cross_entropy(model(x), y, reduction="sum", label_smoothing=0.1)
        loop.backward(loss, num_samples=len(y))
        losses.append(float(loop.step().loss))
    if file is not None:
        assert loop.save_weights(file) == file
        assert {name: each.shape for name, each in load_file(file).items()} == {
            name: each.shape for name, each in Net().state_dict().items()
        }
    return [losses, [name for name, each in model.named_modules() if isinstance(each, FSDPModule)]]


# The smallest modules with 256 parameters are matrices of 8 x 32; the head and the small block go with the root.
LARGE = ["first.up", "first.down", "blocks.a.up", "blocks.a.down"]


WRAPPED: dict[str, tuple[Any, list[str]]] = {
    "class": (Block, ["first", "blocks.a", "blocks.b"]),
    "classes": ((Block, nn.Linear), ["first", "blocks.a", "blocks.b", "head"]),
    "size": (256, LARGE),
}


def train_wrapped(folder: Path) -> dict[str, list[Any]]:
    join()
    return {name: train(wrap, folder / f"{name}.safetensors") for name, (wrap, _) in WRAPPED.items()}


def train_alone(folder: Path) -> list[Any]:
    join()
    return train(None, folder / "alone.safetensors")


def test_models_wrapped_by_class_or_size_train_as_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    (losses, _) = run_ranks(1, train_alone, folder)[0]
    first, second = run_ranks(2, train_wrapped, folder)
    assert first == second
    expected = load_file(folder / "alone.safetensors")
    for name, (_, units) in WRAPPED.items():
        assert first[name][0] == pytest.approx(losses, rel=1e-5)
        assert first[name][1] == ["", *units]
        found = load_file(folder / f"{name}.safetensors")
        for parameter, each in expected.items():
            torch.testing.assert_close(found[parameter], each, rtol=1e-4, atol=1e-6)
    files = sorted(path.name for path in folder.iterdir())
    assert files == sorted(f"{name}.safetensors" for name in ("alone", *WRAPPED))  # no drafts are left


def refused() -> list[str]:
    join()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for options in (
        {"wrap": Block},
        {"sharding": "parameters", "wrap": nn.Conv1d},
        {"sharding": "parameters", "wrap": 10**9},
        {"sharding": "parameters", "wrap": 0},
        {"sharding": "parameters", "wrap": "Block"},
    ):
        with pytest.raises(UserError) as error:
            trimaran.prepare(model, optimizer, **options)  # type: ignore[call-overload]
        assert error.value.code == "K083"
        found.append(error.value.what)
    loop = trimaran.prepare(model, optimizer)
    for file in ("weights.pt", "/proc/weights.safetensors"):
        with pytest.raises(UserError) as error:
            loop.save_weights(file)
        assert error.value.code == "K084"
        found.append(error.value.what)
    return found


def test_mistakes_are_refused_on_all_ranks() -> None:
    first, second = run_ranks(2, refused)
    assert first == second
    assert first[0] == "wrap says how a sharded model is gathered, and sharding is 'none'"
    assert first[1] == "Net has no module of Conv1d"


def guide_blocks() -> list[str]:
    text = GUIDE.read_text().partition(SECTION)[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_guide(folder: Path) -> int:
    """Run the examples of the guide's section one after another, in a folder of their own."""
    os.chdir(folder)
    join()
    torch.manual_seed(0)
    model = Net()
    names: dict[str, Any] = {
        "trimaran": trimaran, "torch": torch, "F": F, "Block": Block, "model": model, "x": torch.randn(6, 8),
        "y": torch.randint(4, (6,)), "optimizer": torch.optim.AdamW(model.parameters()),
    }  # fmt: skip
    for each in guide_blocks():
        exec(each, names)
    return dist.get_rank()


def test_the_examples_of_the_guide_run(tmp_path: Path) -> None:
    assert len(guide_blocks()) >= 7
    assert all(3 <= len(each.splitlines()) <= 6 for each in guide_blocks())
    assert run_ranks(2, run_guide, tmp_path) == [0, 1]
    assert (tmp_path / "weights.safetensors").is_file()
