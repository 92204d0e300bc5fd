"""Compilations are counted from torch's own metrics; those after the warm-up are reported with torch's reason."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runs import new_run
from trimaran.runs import WARM_UP_STEPS, HeartbeatBoard, Journal, read_json_lines
from trimaran.train import Compilations, SupervisorLink


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * 2


@pytest.fixture
def block() -> Iterator[nn.Module]:
    torch._dynamo.reset()
    block = Block()
    block.compile(backend="eager")
    yield block
    torch._dynamo.reset()


def test_nothing_is_reported_when_nothing_is_compiled() -> None:
    compilations = Compilations()
    for step in range(10):
        compilations.end_step(step)
        assert compilations.take_late(step) == ()
    assert compilations.metrics == {}


def test_compilations_of_the_warm_up_count_and_are_not_late(block: nn.Module) -> None:
    compilations = Compilations()
    compilations.end_step(0)
    block(torch.randn(4))
    compilations.end_step(1)
    block(torch.randn(4))
    compilations.end_step(2)
    assert compilations.metrics == {"compiles": 1, "recompiles": 0}
    assert compilations.seconds > 0
    assert compilations.summary()["compiles"] == 1


def test_a_new_shape_after_the_warm_up_is_reported_once_with_its_function(block: nn.Module) -> None:
    compilations = Compilations()
    compilations.end_step(0)
    block(torch.randn(4))
    for step in range(1, WARM_UP_STEPS + 2):
        compilations.end_step(step)
    block(torch.randn(5))
    late = WARM_UP_STEPS + 2
    (compilation,) = compilations.take_late(late)
    assert compilation.what.startswith("forward (test_train_compilations.py:")
    assert "size mismatch" in compilation.why
    assert compilations.take_late(late) == (), "reported once"
    block(torch.randn(6))  # torch has made the size dynamic
    compilations.end_step(late + 1)
    assert compilations.metrics == {"compiles": 2, "recompiles": 1}


def test_compilations_of_an_evaluation_belong_to_no_step(block: nn.Module) -> None:
    compilations = Compilations()
    for step in range(WARM_UP_STEPS + 2):
        compilations.end_step(step)
    with compilations.outside_steps(WARM_UP_STEPS + 2), torch.no_grad():
        block(torch.randn(4))
    compilations.end_step(WARM_UP_STEPS + 3)
    assert compilations.metrics == {"compiles": 1, "recompiles": 0}


def test_a_rewind_restarts_the_warm_up(block: nn.Module) -> None:
    compilations = Compilations()
    for step in range(20):
        compilations.end_step(step)
    compilations.end_step(10)
    block(torch.randn(4))
    compilations.end_step(11)
    assert compilations.is_first(11)
    assert compilations.late == 0


@pytest.mark.parametrize("section", ["step", "first", "evaluation"])
def test_a_compilation_is_reported_to_the_supervisor_in_any_section(section: Any) -> None:
    link, during = SupervisorLink(board=HeartbeatBoard.make(1)), []

    def backend(module: Any, _: Any) -> Any:
        during.append(link.heartbeat)
        return module.forward

    torch._dynamo.reset()
    Compilations(link).end_step(0)
    link.report_section(section, 7)
    torch.compile(torch.sin, backend=backend)(torch.zeros(2))
    torch._dynamo.reset()
    assert [(heartbeat.section, heartbeat.step) for heartbeat in during if heartbeat] == [("compile", 7)]
    assert link.heartbeat is not None
    assert (link.heartbeat.section, link.heartbeat.step) == (section, 7)


def test_until_the_first_step_ends_each_compilation_is_an_event_with_its_function(
    block: nn.Module, tmp_path: Path
) -> None:
    run = new_run(tmp_path / "run", world_size=1)
    with Journal(run, 0) as journal:
        compilations = Compilations(journal=journal)
        compilations.end_step(0)
        block(torch.randn(4))
        compilations.end_step(1)
        block(torch.randn(4, 2))
    began, ended = [each for each in read_json_lines(run.events(0)) if each["kind"] == "compile"]
    assert began["data"] == {"what": "Block.forward", "number": 1}
    assert ended["data"].keys() == {"what", "number", "seconds"}
    assert compilations.summary()["functions"] == {"Block.forward": ended["data"]["seconds"]}


def test_only_rank_0_writes_events_of_compilations(block: nn.Module, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", world_size=2)
    with Journal(run, 1) as journal:
        Compilations(journal=journal)
        block(torch.randn(4))
    assert [*read_json_lines(run.events(1))] == []
