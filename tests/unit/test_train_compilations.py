"""Compilations are counted from torch's own books; what is compiled after the warm-up is told with its reason."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimaran.run import HeartbeatBoard
from trimaran.train.health.compilations import WARM_STEPS, Compilations
from trimaran.train.process.supervisor_link import SupervisorLink


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


def test_nothing_is_told_where_nothing_is_compiled() -> None:
    compilations = Compilations()
    for step in range(10):
        compilations.mark(step)
        assert compilations.read(step) == ()
    assert compilations.details == {}


def test_the_warm_up_counts_and_is_not_late(block: nn.Module) -> None:
    compilations = Compilations()
    compilations.mark(0)
    block(torch.randn(4))
    compilations.mark(1)
    block(torch.randn(4))
    compilations.mark(2)
    assert compilations.details == {"compiles": 1, "recompiles": 0}
    assert compilations.seconds > 0
    assert compilations.facts()["compiles"] == 1


def test_a_new_shape_after_the_warm_up_is_late_once_and_named(block: nn.Module) -> None:
    compilations = Compilations()
    compilations.mark(0)
    block(torch.randn(4))
    for step in range(1, WARM_STEPS + 2):
        compilations.mark(step)
    block(torch.randn(5))
    late = WARM_STEPS + 2
    (told,) = compilations.read(late)
    assert told.what.startswith("forward (test_train_compilations.py:")
    assert "size mismatch" in told.why
    assert compilations.read(late) == (), "told once"
    block(torch.randn(6))  # torch has made the size dynamic
    compilations.mark(late + 1)
    assert compilations.details == {"compiles": 2, "recompiles": 1}


def test_what_an_evaluation_compiles_belongs_to_no_step(block: nn.Module) -> None:
    compilations = Compilations()
    for step in range(WARM_STEPS + 2):
        compilations.mark(step)
    with compilations.aside(WARM_STEPS + 2), torch.no_grad():
        block(torch.randn(4))
    compilations.mark(WARM_STEPS + 3)
    assert compilations.details == {"compiles": 1, "recompiles": 0}


def test_a_run_that_goes_back_warms_up_again(block: nn.Module) -> None:
    compilations = Compilations()
    for step in range(20):
        compilations.mark(step)
    compilations.mark(10)
    block(torch.randn(4))
    compilations.mark(11)
    assert compilations.is_first(11)
    assert compilations.late == 0


@pytest.mark.parametrize(("section", "seen"), [("step", "compile"), ("first", "first"), ("evaluation", "evaluation")])
def test_the_supervisor_sees_when_something_is_compiled_in_the_middle_of_a_step(section: Any, seen: str) -> None:
    link, during = SupervisorLink(board=HeartbeatBoard.make(1)), []

    def backend(module: Any, _: Any) -> Any:
        during.append(link.heartbeat)
        return module.forward

    torch._dynamo.reset()
    Compilations(link).mark(0)
    link.enter(section, 7)
    torch.compile(torch.sin, backend=backend)(torch.zeros(2))
    torch._dynamo.reset()
    assert [(heartbeat.section, heartbeat.step) for heartbeat in during if heartbeat] == [(seen, 7)]
    assert link.heartbeat is not None
    assert (link.heartbeat.section, link.heartbeat.step) == (section, 7)
