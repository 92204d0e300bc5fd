"""Steps that are replayed as CUDA graphs train the same as steps that are not."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config

from tests.hf_models import SMALL
from trimaran.core import Plan, Recipe
from trimaran.runs import Journal, create_run
from trimaran.train import (
    EAGER_STEPS,
    Checkpointer,
    PlainStepper,
    StepGraphs,
    WorkerParts,
    build_worker_parts,
    join_process_group,
    read_context,
    read_rank_info,
)

pytestmark = pytest.mark.gpu
STEPS = 12


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels whose results do not change from call to call, so that losses can be compared bit by bit."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass
class Trained:
    """The metrics of a run's steps, its last weights, and whether its last step was replayed."""

    lines: list[dict[str, Any]]
    weights: list[torch.Tensor]
    captured: bool

    @property
    def numbers(self) -> list[tuple[float, float]]:
        return [(line["loss"], line["grad_norm"]) for line in self.lines]


def graphs_of(parts: WorkerParts) -> StepGraphs | None:
    assert isinstance(parts.trainer.stepper, PlainStepper)
    return parts.trainer.stepper._graphs


def train(folder: Path, plan: dict[str, Any], change: Any = None, **sections: Any) -> Trained:
    """Train some steps in this process. `change` may change the parts of the worker before."""
    if not dist.is_initialized():
        join_process_group(read_rank_info({}))
    tree = {"train": {"steps": STEPS, "global_batch": 8, "save": False, "sample": {"tokens": 0}}, **sections}
    run = create_run(folder / f"run-{len(list(folder.iterdir()))}", Recipe.model_validate(tree), Plan(**plan))
    with Journal(run, 0) as journal:
        parts = build_worker_parts(read_context(run, read_rank_info({}), journal, cache=folder.parent / "cache"))
        if change is not None:
            change(parts)
        checkpointer = Checkpointer.resume(parts.checkpoint)
        parts.trainer.train(checkpointer, checkpointer.start)
        graphs = graphs_of(parts)
        weights = [each.detach().clone() for each in parts.networks[0].module.parameters()]
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return Trained(lines, weights, graphs is not None and graphs.is_captured)


def assert_same(folder: Path, plan: dict[str, Any], **sections: Any) -> None:
    with_graphs, without = (train(folder, plan | {"cuda_graphs": each}, **sections) for each in (True, False))
    assert with_graphs.captured
    assert not without.captured
    assert with_graphs.numbers == without.numbers
    assert all(torch.equal(a, b) for a, b in zip(with_graphs.weights, without.weights, strict=True))
    for line in with_graphs.lines:
        assert sum(line["phases"].values()) == pytest.approx(line["step_seconds"])
        assert line["phases"]["forward"] > 0
        assert line["phases"]["backward"] > 0
        assert line["phases"]["optimizer"] > 0


BF16 = {"micro_batch": 8, "precision": "bf16", "loss": "fused"}


@pytest.mark.parametrize(
    "plan",
    [
        BF16,
        BF16 | {"compile": True},
        BF16 | {"compile": True, "recompute": "full"},
        BF16 | {"micro_batch": 2, "grad_accum": 4},
        {"micro_batch": 8, "loss": "logits"},
        {"micro_batch": 4, "grad_accum": 2, "precision": "bf16", "loss": "chunked", "compile": True},
    ],
    ids=["bf16", "compiled", "recompute", "accumulated", "fp32", "chunked"],
)
def test_replayed_steps_train_the_same_bit_for_bit(tmp_path: Path, plan: dict[str, Any]) -> None:
    assert_same(tmp_path, plan)


def test_dropout_draws_other_elements_at_each_replay_and_the_same_as_without_graphs(tmp_path: Path) -> None:
    assert_same(tmp_path, BF16, model={"adapter": {"rank": 4, "dropout": 0.5}})


def test_a_mixture_of_experts_is_replayed_with_its_statistics(tmp_path: Path) -> None:
    plan, model = BF16, {"preset": "tiny-moe"}
    with_graphs, without = (train(tmp_path, plan | {"cuda_graphs": each}, model=model) for each in (True, False))
    assert with_graphs.captured
    assert with_graphs.numbers == [pytest.approx(each, rel=1e-4) for each in without.numbers]
    loads = [[line["router"]["imbalance"] for line in each.lines] for each in (with_graphs, without)]
    assert loads[0] == pytest.approx(loads[1], rel=0.05)


def test_a_model_of_transformers_is_replayed(tmp_path: Path) -> None:
    shape = SMALL | {"vocab_size": 512, "head_dim": 16, "max_position_embeddings": 512}
    Qwen3Config(**shape).save_pretrained(tmp_path / "model")
    (tmp_path / "runs").mkdir()
    assert_same(tmp_path / "runs", BF16, model={"family": "hf", "path": str(tmp_path / "model")})


def test_documents_of_changing_lengths_are_not_captured(tmp_path: Path) -> None:
    done = train(tmp_path, BF16, data={"isolate_documents": True, "seq_len": 256})
    assert not done.captured
    assert len(done.lines) == STEPS


def test_evaluation_between_replayed_steps_changes_nothing(tmp_path: Path) -> None:
    base = {"steps": STEPS, "global_batch": 8, "save": False, "sample": {"tokens": 0}}
    often = train(tmp_path, BF16, train=base | {"evaluate": {"every": 3, "batches": 2}}, data={"holdout": 0.1})
    never = train(tmp_path, BF16, train=base | {"evaluate": {"batches": 0}}, data={"holdout": 0.1})
    assert often.captured
    assert often.numbers == never.numbers


def test_weights_that_move_are_captured_again(tmp_path: Path) -> None:
    def move_later(parts: WorkerParts) -> None:
        stepper, embedding = parts.trainer.stepper, parts.networks[0].module.get_parameter("embed_tokens.weight")
        step, moved = stepper.step, []

        def move_and_step(batch: Any, **options: Any) -> torch.Tensor:
            if batch.step == EAGER_STEPS + 3 and not moved:
                moved.append(embedding.data)
                embedding.data = embedding.data.clone()
                moved[0].fill_(float("nan"))
            return step(batch, **options)

        stepper.step = move_and_step  # pyrefly: ignore[bad-assignment]

    moved, still = train(tmp_path, BF16, move_later), train(tmp_path, BF16)
    assert moved.captured
    assert [line["loss"] for line in moved.lines] == [line["loss"] for line in still.lines]


def test_a_model_that_reads_a_number_from_the_device_trains_without_graphs(tmp_path: Path) -> None:
    def read_in_forward(parts: WorkerParts) -> None:
        def read(_: object, __: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            assert output[0].sum().item() > 0

        parts.networks[0].module.register_forward_hook(read)

    reading = train(tmp_path, BF16, read_in_forward)
    assert torch.cuda.current_stream() == torch.cuda.default_stream(), "other threads use that one"
    plain = train(tmp_path, BF16)
    assert not reading.captured
    assert plain.captured
    assert reading.numbers == plain.numbers


def test_a_model_that_draws_on_the_host_trains_without_graphs(tmp_path: Path) -> None:
    def draw_in_forward(parts: WorkerParts) -> None:
        def draw(*_: object) -> None:
            torch.rand(())

        parts.networks[0].module.register_forward_hook(draw)

    assert not train(tmp_path, BF16, draw_in_forward).captured


def test_a_refused_step_is_searched_and_training_goes_on(tmp_path: Path) -> None:
    def spoil_later(parts: WorkerParts) -> None:
        stepper = parts.trainer.stepper
        step = stepper.step

        def spoil_and_step(batch: Any, **options: Any) -> torch.Tensor:
            numbers = step(batch, **options)
            if batch.step == EAGER_STEPS + 3:
                numbers[0] = float("nan")
            return numbers

        stepper.step = spoil_and_step  # pyrefly: ignore[bad-assignment]

    done = train(tmp_path, BF16, spoil_later)
    assert [line["step"] for line in done.lines if line.get("skipped")] == [EAGER_STEPS + 4]
    assert done.captured  # again, after the search
    assert len(done.lines) == STEPS
