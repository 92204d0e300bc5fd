"""The doctor on real unhealthy runs: the finding, its culprit, and whether the patch helps."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.fault_run import inject_fault, remove_pause, start_run
from tests.diagnosed_runs import VLM_SETTINGS, findings, recipe_of, train, with_patch, write_images
from tests.disks import mounted
from tests.dist.test_nonfinite_search import NanFault, plant
from tests.fault.harness import Supervised, lines, wait_for
from tests.fault.injections import change_network, hook
from trimaran.core import EXIT_DONE, EXIT_STUCK, Finding, Recipe
from trimaran.nets import Network
from trimaran.runs import RunDirectory

pytestmark = pytest.mark.chaos


def losses(run: RunDirectory) -> list[float]:
    return [each["loss"] for each in lines(run.metrics)]


def short(*settings: str) -> Recipe:
    return recipe_of("train.steps=40", "telemetry.details_every=2", *settings)


def plant_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        plant(NanFault("layers.2.mlp.down_proj", call=10))


def test_an_injected_nan_is_traced_to_its_module_and_rank(tmp_path: Path) -> None:
    recipe = short("cluster=2xcpu", "plan.mesh.dp_replicate=2", "plan.grad_accum=1")
    found = findings(train(recipe, tmp_path / "run", plant_on_rank_1))
    assert found["F050"].culprit == "layers.2.mlp.down_proj on rank 1"
    assert found["F050"].severity == "fault"
    assert found["F050"].patch == {"faults.not_finite": "rewind"}
    assert found["F050"].evidence["sample_ids"]


def test_a_100x_learning_rate_is_found_and_the_patch_learns_better(tmp_path: Path) -> None:
    recipe = short("cluster=1xcpu", "train.lr=0.1", "train.steps=150")
    high = train(recipe, tmp_path / "high")
    found = findings(high)["F056"]
    assert found.culprit.startswith("train.lr 0.1")
    assert found.patch == {"train.lr": 0.008}
    lower = train(with_patch(recipe, found), tmp_path / "lower")
    assert "F056" not in findings(lower)
    assert sum(losses(lower)[-10:]) < sum(losses(high)[-10:])


def test_a_tiny_learning_rate_is_found_and_the_patch_learns(tmp_path: Path) -> None:
    recipe = short("cluster=1xcpu", "train.lr=1e-8")
    found = findings(train(recipe, tmp_path / "low"))["F057"]
    patched = train(with_patch(recipe, found), tmp_path / "patched")
    assert "F057" not in findings(patched)
    assert losses(patched)[-1] < losses(patched)[0] - 0.1


def test_a_rising_loss_without_warm_up_is_found(tmp_path: Path) -> None:
    recipe = short("cluster=1xcpu", "train.lr=0.5", "train.schedule.warmup_steps=0")
    found = findings(train(recipe, tmp_path / "run"))["F058"]
    assert found.patch == {"train.schedule.warmup_steps": 10}


def overflow(module: torch.nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
    return Overflow.apply(out)


def test_overflowing_fp16_gets_a_bf16_patch(tmp_path: Path) -> None:
    recipe = short("cluster=1xcpu", "plan.precision=fp16")
    found = findings(train_until_error(recipe, tmp_path / "run", partial(hook, "norm", overflow)))["F054"]
    assert found.severity == "fault"
    assert found.patch == {"plan.precision": "bf16"}


class Overflow(torch.autograd.Function):
    """The identity; its gradient is too large for fp16 at any loss scale."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1e30 * 1e30


def train_until_error(recipe: Recipe, folder: Path, inject: Callable[[], None]) -> RunDirectory:
    """Train a run that ends with an error."""
    with pytest.raises(AssertionError):
        train(recipe, folder, inject)
    (found,) = list(folder.rglob("metrics.jsonl"))
    return RunDirectory(found.parent)


def add_spare(network: Network) -> None:
    network.module.get_submodule("layers.1").spare = torch.nn.Linear(4, 4)


def test_an_unused_parameter_is_named(tmp_path: Path) -> None:
    found = findings(train(short("cluster=1xcpu"), tmp_path / "run", partial(change_network, add_spare)))["F055"]
    assert found.culprit == "layers.1.spare"
    assert found.evidence["parameters"] == ["layers.1.spare.bias", "layers.1.spare.weight"]


def close_gate(module: torch.nn.Module, given: Any, out: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return out[0].detach() + 1e-9 * (out[0] - out[0].detach()), out[1]


def test_a_closed_gate_is_found_by_its_gradients(tmp_path: Path) -> None:
    recipe = short("cluster=1xcpu", "plan.grad_accum=1")
    found = findings(train(recipe, tmp_path / "run", partial(hook, "layers.3", close_gate)))["F053"]
    assert found.culprit.startswith("layers.")
    assert found.fix


class Grow:
    """A hook whose gradients become larger with each call."""

    def __init__(self) -> None:
        self._factors = [1.3**number for number in range(200)]

    def __call__(self, module: torch.nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
        if out.requires_grad and module.training:
            factor = self._factors.pop(0)
            out.register_hook(lambda gradient: gradient * factor)
        return out


def test_exploding_gradients_are_found(tmp_path: Path) -> None:
    recipe, grow = short("cluster=1xcpu", "plan.grad_accum=1", "plan.loss=logits"), partial(hook, "lm_head", Grow())
    found = findings(train(recipe, tmp_path / "run", grow))["F052"]
    assert found.patch == {"train.lr": 1e-4}
    assert found.evidence["now"] > 100 * found.evidence["before"]
    unclipped = short("cluster=1xcpu", "plan.grad_accum=1", "plan.loss=logits", "train.clip_norm=0")
    assert findings(train(unclipped, tmp_path / "unclipped", grow))["F052"].patch == {"train.clip_norm": 1.0}


def test_truncated_images_are_counted(tmp_path: Path) -> None:
    path = write_images(tmp_path / "images", sides=[32])
    for number in range(0, 200, 5):
        image = tmp_path / "images" / f"{number}.png"
        image.write_bytes(image.read_bytes()[:60])  # the header with the size, but no pixels
    settings = (f"data.path={path}", f"data.samples.images={tmp_path / 'images'}", "data.samples.max_bad=0.5")
    found = findings(train(recipe_of(*VLM_SETTINGS, *settings, "train.steps=30"), tmp_path / "run"))["F072"]
    assert found.severity == "warning"
    assert len(found.evidence["samples"]) == 8
    assert found.culprit == "data.source chat"


def test_a_disk_too_small_for_two_checkpoints_is_found(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=300m") as small:
        settings = ("train.steps=40", "telemetry.sample_seconds=0.2")
        with Supervised.start(small / "run", *settings, pause=0.05) as supervised:
            assert supervised.wait() == EXIT_DONE
        found = diagnosed(supervised, "F068")
        assert found.patch == {"checkpoint.keep": 1}
        assert "are free on" in found.verdict


def diagnosed(supervised: Supervised, code: str) -> Finding:
    return findings(supervised.run)[code]


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [("hang:1:6:0", "F063", "hung"), ("abort:1:6:0", "F065", "SIGABRT"), ("segfault:1:6:0", "F065", "SIGSEGV")],
)
def test_a_rank_that_fails_once_is_named(tmp_path: Path, fault: str, code: str, text: str) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=20", "faults.hang_seconds=2", fault=fault) as supervised:
        assert supervised.wait() == EXIT_DONE
    found = diagnosed(supervised, code)
    assert (found.culprit, found.severity) == ("rank 1", "warning")
    assert text in found.verdict
    assert found.fix
    assert "F066" not in findings(supervised.run)


def test_attempts_without_progress_are_counted_and_the_rank_is_named(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=20", fault="kill:1:6") as supervised:
        assert supervised.wait() == EXIT_STUCK
    *restarted, last = supervised.faults
    assert [each.action for each in restarted] == ["restarted"] * 3
    assert (last.action, last.suspects) == ("stopped", (1,))
    assert "step 6" in last.evidence["why"]
    assert "rank 1" in last.evidence["why"]
    found = diagnosed(supervised, "F066")
    assert (found.culprit, found.severity) == ("rank 1", "fault")
    assert found.patch == {"faults.ranks": [1, 2]}
    assert "step 6" in found.verdict
    assert diagnosed(supervised, "F065").severity == "fault"


def test_fragmented_memory_gets_expandable_segments_and_the_plan_stays(tmp_path: Path) -> None:
    """The fault occurs until the allocator's variable is set, and by then the run must not have changed its plan."""
    with Supervised.start(tmp_path / "run", "train.steps=20", fault="fragmented:1:6") as supervised:
        assert supervised.wait() == EXIT_DONE
    (incident,) = supervised.faults
    assert (incident.cause, incident.action) == ("oom", "replanned")
    assert incident.evidence["allocator"] == "expandable_segments:True"
    assert "3.0 GiB were free in pieces, 1.0 GiB were wanted" in incident.evidence["why"]
    assert supervised.run.earlier_plans() == []


def test_memory_that_stays_fragmented_gets_the_next_rung_of_the_ladder(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=20", fault="fragmented:1:6:0,oom:1:6:1") as supervised:
        assert supervised.wait() == EXIT_DONE
    first, second = supervised.faults
    assert first.evidence["allocator"]
    assert "allocator" not in second.evidence
    assert [each.action for each in (first, second)] == ["replanned", "replanned"]
    (before,) = supervised.run.earlier_plans()
    assert supervised.run.read_plan(before).global_batch == supervised.run.read_plan().global_batch


def test_out_of_memory_without_a_restart_gets_the_cheapest_fix_as_its_patch(tmp_path: Path) -> None:
    settings = ("train.steps=20", "plan.micro_batch=4", "plan.grad_accum=1", "faults.restart=false")
    with start_run(tmp_path / "run", *settings) as supervised:
        supervised.wait_for_step(5)
        inject_fault(supervised, 1, "memory")
        supervised.wait()
    found = diagnosed(supervised, "F062")
    assert (found.culprit, found.severity) == ("rank 1", "fault")
    assert found.patch
    assert "instead of" in found.expected_effect
    assert found.evidence["holder"]


def test_mismatched_collectives_are_found_with_their_lines_of_code(tmp_path: Path) -> None:
    with start_run(tmp_path / "run", "train.steps=60", "train.global_batch=12", ranks=3) as supervised:
        supervised.wait_for_step(15)
        inject_fault(supervised, 1, "barrier")
        supervised.wait_for_fault(0)
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    found = diagnosed(supervised, "F064")
    assert "rank 1" in found.culprit or "ranks" in found.culprit
    assert "plugin.py" in found.evidence["sites"]["1"]


def test_a_loss_spike_and_a_flipped_bit_are_found(tmp_path: Path) -> None:
    settings = ("train.steps=100", "train.global_batch=12", "checkpoint.memory=1", "checkpoint.every=10")
    with start_run(tmp_path / "run", *settings, "checkpoint.keep=8", ranks=3, compare="10") as supervised:
        supervised.wait_for_step(25)
        inject_fault(supervised, 1, "spike")
        wait_for(lambda: supervised.events(0, "skip"))
        inject_fault(supervised, 2, "flip")
        wait_for(lambda: supervised.events(0, "differ"))
        remove_pause(supervised)
        supervised.wait()
    assert diagnosed(supervised, "F051").culprit == "rank 1"
    assert diagnosed(supervised, "F051").patch == {"faults.not_finite": "rewind"}
    assert diagnosed(supervised, "F073").culprit == "rank 2"


def test_healthy_runs_have_no_health_findings(tmp_path: Path) -> None:
    for number, settings in enumerate(
        (
            ("cluster=1xcpu",),
            ("cluster=2xcpu", "plan.mesh.dp_shard=2", "plan.precision=bf16"),
            ("cluster=2xcpu", "plan.mesh.tp=2"),
            ("cluster=1xcpu", "plan.precision=fp16", "train.lr=3e-3"),
        )
    ):
        found = findings(train(short(*settings), tmp_path / f"{number}"))
        assert not [each for code, each in found.items() if code >= "F050"], settings
