"""The doctor against runs that go wrong for real: what is found, who is to blame, and whether the patch helps."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.fault_run import hurry, order, sail
from tests.disks import mounted
from tests.dist.test_birth import Fault, plant
from tests.doctoring import SEEING, findings, mended, recipe_of, train, write_images
from tests.fault.harness import Supervised, lines, wait_for
from trimaran.core import EXIT_DONE, EXIT_STUCK, Finding, Recipe
from trimaran.nets import Network
from trimaran.run import RunDirectory
from trimaran.train import build

pytestmark = pytest.mark.chaos

Hook = Callable[[torch.nn.Module, Any, Any], Any]


def hooked(monkeypatch: pytest.MonkeyPatch, module: str, hook: Hook, *, rank: int = 0) -> None:
    """Let a module of the networks that one rank will build have a forward hook."""
    build_networks = build.build_networks

    def with_hook(*args: Any) -> tuple[Network, ...]:
        networks = build_networks(*args)
        if os.environ["RANK"] == str(rank):
            networks[0].module.get_submodule(module).register_forward_hook(hook)
        return networks

    monkeypatch.setattr(build, "build_networks", with_hook)


def losses(run: RunDirectory) -> list[float]:
    return [each["loss"] for each in lines(run.metrics)]


def short(*settings: str) -> Recipe:
    return recipe_of("train.steps=40", "telemetry.details_every=2", *settings)


def test_a_planted_nan_is_traced_to_its_module_and_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_networks = build.build_networks

    def with_fault(*args: Any) -> tuple[Network, ...]:
        build.build_networks = build_networks
        if os.environ["RANK"] == "1":
            plant(Fault("layers.2.mlp.down_proj", call=10))
        return build.build_networks(*args)

    monkeypatch.setattr(build, "build_networks", with_fault)
    found = findings(train(short("cluster=2xcpu", "plan.mesh.dp_replicate=2", "plan.grad_accum=1"), tmp_path / "run"))
    assert found["F050"].culprit == "layers.2.mlp.down_proj on rank 1"
    assert found["F050"].severity == "fault"
    assert found["F050"].patch == {"faults.not_finite": "rewind"}
    assert found["F050"].evidence["sample_ids"]


def test_a_hundredfold_learning_rate_is_found_and_the_patch_learns_more(tmp_path: Path) -> None:
    recipe = short("cluster=1xcpu", "train.lr=0.1", "train.steps=150")
    high = train(recipe, tmp_path / "high")
    found = findings(high)["F056"]
    assert found.culprit.startswith("train.lr 0.1")
    assert found.patch == {"train.lr": 0.008}
    lower = train(mended(recipe, found), tmp_path / "lower")
    assert "F056" not in findings(lower)
    assert sum(losses(lower)[-10:]) < sum(losses(high)[-10:])


def test_a_learning_rate_that_teaches_nothing_is_found_and_the_patch_learns(tmp_path: Path) -> None:
    recipe = short("cluster=1xcpu", "train.lr=1e-8")
    found = findings(train(recipe, tmp_path / "low"))["F057"]
    learnt = train(mended(recipe, found), tmp_path / "mended")
    assert "F057" not in findings(learnt)
    assert losses(learnt)[-1] < losses(learnt)[0] - 0.1


def test_a_run_without_a_warm_up_that_stumbles_is_found(tmp_path: Path) -> None:
    recipe = short("cluster=1xcpu", "train.lr=0.5", "train.schedule.warmup_steps=0")
    found = findings(train(recipe, tmp_path / "run"))["F058"]
    assert found.patch == {"train.schedule.warmup_steps": 10}


def test_fp16_that_overflows_is_told_to_use_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked(monkeypatch, "norm", lambda module, given, out: Overflow.apply(out))
    recipe = short("cluster=1xcpu", "plan.precision=fp16")
    found = findings(train_to_the_end(recipe, tmp_path / "run"))["F054"]
    assert found.severity == "fault"
    assert found.patch == {"plan.precision": "bf16"}


class Overflow(torch.autograd.Function):
    """Returns what it gets; its gradient is too large for fp16 at any scale."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1e30 * 1e30


def train_to_the_end(recipe: Recipe, folder: Path) -> RunDirectory:
    """Train a run that ends in an error."""
    with pytest.raises(AssertionError):
        train(recipe, folder)
    (found,) = list(folder.rglob("metrics.jsonl"))
    return RunDirectory(found.parent)


def test_a_parameter_without_a_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_networks = build.build_networks

    def with_spare(*args: Any) -> tuple[Network, ...]:
        networks = build_networks(*args)
        networks[0].module.get_submodule("layers.1").spare = torch.nn.Linear(4, 4)
        return networks

    monkeypatch.setattr(build, "build_networks", with_spare)
    found = findings(train(short("cluster=1xcpu"), tmp_path / "run"))["F055"]
    assert found.culprit == "layers.1.spare"
    assert found.evidence["parameters"] == ["layers.1.spare.bias", "layers.1.spare.weight"]


def test_a_gate_that_is_shut_is_found_in_the_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooked(
        monkeypatch,
        "layers.3",
        lambda module, given, out: (out[0].detach() + 1e-9 * (out[0] - out[0].detach()), out[1]),
    )
    found = findings(train(short("cluster=1xcpu", "plan.grad_accum=1"), tmp_path / "run"))["F053"]
    assert found.culprit.startswith("layers.")
    assert found.fix


def test_gradients_that_grow_and_grow_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factors = [1.3**number for number in range(200)]

    def grow(module: torch.nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
        if out.requires_grad and module.training:
            factor = factors.pop(0)
            out.register_hook(lambda gradient: gradient * factor)
        return out

    hooked(monkeypatch, "lm_head", grow)
    recipe = short("cluster=1xcpu", "plan.grad_accum=1", "plan.loss=logits")
    found = findings(train(recipe, tmp_path / "run"))["F052"]
    assert found.patch == {"train.lr": 1e-4}
    assert found.evidence["now"] > 100 * found.evidence["before"]
    unclipped = short("cluster=1xcpu", "plan.grad_accum=1", "plan.loss=logits", "train.clip_norm=0")
    assert findings(train(unclipped, tmp_path / "unclipped"))["F052"].patch == {"train.clip_norm": 1.0}


def test_pictures_that_are_cut_short_are_counted(tmp_path: Path) -> None:
    path = write_images(tmp_path / "pictures", sides=[32])
    for number in range(0, 200, 5):
        image = tmp_path / "pictures" / f"{number}.png"
        image.write_bytes(image.read_bytes()[:60])  # with its size, and without its pixels
    settings = (f"data.path={path}", f"data.samples.images={tmp_path / 'images'}", "data.samples.max_bad=0.5")
    found = findings(train(recipe_of(*SEEING, *settings, "train.steps=30"), tmp_path / "run"))["F072"]
    assert found.severity == "warning"
    assert len(found.evidence["samples"]) == 8
    assert found.culprit == "data.source chat"


def test_a_disk_without_room_for_two_checkpoints_is_found(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=300m") as small:
        settings = ("train.steps=40", "telemetry.sample_seconds=0.2")
        with Supervised.start(small / "run", *settings, pause=0.05) as sailing:
            assert sailing.wait() == EXIT_DONE
        found = diagnosed(sailing, "F068")
        assert found.patch == {"checkpoint.keep": 1}
        assert "are free on" in found.verdict


def diagnosed(sailing: Supervised, code: str) -> Finding:
    return findings(sailing.run)[code]


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [("hang:1:6:0", "F063", "hung"), ("abort:1:6:0", "F065", "SIGABRT"), ("segfault:1:6:0", "F065", "SIGSEGV")],
)
def test_a_rank_that_fails_once_is_named(tmp_path: Path, fault: str, code: str, words: str) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=20", "faults.hang_seconds=2", fault=fault) as sailing:
        assert sailing.wait() == EXIT_DONE
    found = diagnosed(sailing, code)
    assert (found.culprit, found.severity) == ("rank 1", "warning")
    assert words in found.verdict
    assert found.fix
    assert "F066" not in findings(sailing.run)


def test_starts_that_bring_nothing_new_are_counted_and_the_rank_is_named(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", "train.steps=20", fault="kill:1:6") as sailing:
        assert sailing.wait() == EXIT_STUCK
    found = diagnosed(sailing, "F066")
    assert (found.culprit, found.severity) == ("rank 1", "fault")
    assert found.patch == {"faults.ranks": [1, 2]}
    assert "step 6" in found.verdict
    assert diagnosed(sailing, "F065").severity == "fault"


def test_memory_that_runs_out_ends_in_the_plan_that_fits(tmp_path: Path) -> None:
    """The first time the run helps itself; the patch is what it went on with."""
    settings = ("train.steps=20", "plan.micro_batch=4", "plan.grad_accum=1")
    with Supervised.start(tmp_path / "run", *settings, fault="oom:1:6:0") as sailing:
        assert sailing.wait() == EXIT_DONE
    found = diagnosed(sailing, "F062")
    assert found.culprit == "rank 1"
    assert found.patch["plan.micro_batch"] == 2
    assert found.patch["plan.grad_accum"] == 2


def test_memory_that_runs_out_for_good_has_the_cheapest_way_out_as_its_patch(tmp_path: Path) -> None:
    settings = ("train.steps=20", "plan.micro_batch=4", "plan.grad_accum=1", "faults.restart=false")
    with sail(tmp_path / "run", *settings) as sailing:
        sailing.wait_for_step(5)
        order(sailing, 1, "memory")
        sailing.wait()
    found = diagnosed(sailing, "F062")
    assert (found.culprit, found.severity) == ("rank 1", "fault")
    assert found.patch
    assert "instead of" in found.expected_effect
    assert found.evidence["holder"]


def test_collectives_that_do_not_match_are_found_with_their_lines(tmp_path: Path) -> None:
    with sail(tmp_path / "run", "train.steps=60", "train.global_batch=12", ranks=3) as sailing:
        sailing.wait_for_step(15)
        order(sailing, 1, "barrier")
        sailing.wait_for_trouble(0, 40)
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE
    found = diagnosed(sailing, "F064")
    assert "rank 1" in found.culprit or "ranks" in found.culprit
    assert "plugin.py" in found.evidence["sites"]["1"]


def test_a_jump_of_the_loss_and_a_flipped_bit_are_found(tmp_path: Path) -> None:
    settings = ("train.steps=100", "train.global_batch=12", "checkpoint.memory=1", "checkpoint.every=10")
    with sail(tmp_path / "run", *settings, "checkpoint.keep=8", ranks=3, compare="10") as sailing:
        sailing.wait_for_step(25)
        order(sailing, 1, "spike")
        wait_for(lambda: sailing.events(0, "skip"), 30)
        order(sailing, 2, "flip")
        wait_for(lambda: sailing.events(0, "differ"), 30)
        hurry(sailing)
        sailing.wait()
    assert diagnosed(sailing, "F051").culprit == "rank 1"
    assert diagnosed(sailing, "F051").patch == {"faults.not_finite": "rewind"}
    assert diagnosed(sailing, "F073").culprit == "rank 2"


def test_healthy_runs_get_no_finding_about_their_health(tmp_path: Path) -> None:
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
