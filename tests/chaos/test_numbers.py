"""NaN and Inf, bad samples, dead loaders, mismatched collectives and flipped bits; `nan` to `bit-flip` in the guide."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.chaos.fault_run import (
    NAME_SECONDS,
    RESUME_SECONDS,
    assert_as_undisturbed,
    inject_fault,
    remove_pause,
    start_run,
)
from tests.fault.harness import Supervised, lines, wait_for
from trimaran.checkpoint import complete_steps
from trimaran.core import EXIT_DONE, Incident
from trimaran.data import DataShare, TokenShards, cache_folder, positions, prepare, split
from trimaran.runs import RunDirectory

pytestmark = pytest.mark.chaos


def samples_of(run: RunDirectory, step: int, rank: int) -> list[int]:
    """Return the samples of a rank at `step`, which counts from 1."""
    recipe, plan = run.read_recipe(), run.read_plan()
    training, _ = split(TokenShards.open(prepare(recipe.data, cache=cache_folder(os.environ))), recipe.data)
    share = DataShare(rank=rank, dp=plan.mesh.dp, micro_batch=plan.micro_batch, grad_accum=plan.grad_accum)
    return positions(recipe.train.seed, share.indices(step - 1).ravel(), len(training)).tolist()


def next_fault(supervised: Supervised, known: int) -> Incident:
    return wait_for(lambda: [each for each in supervised.faults[known:] if each.action], 30)[0]


def test_updates_with_nan_or_inf_are_skipped_and_their_samples_are_reported(tmp_path: Path) -> None:
    """Fault `nan`: NaN and Inf in the loss, NaN in the gradient only, and a loss spike."""
    with start_run(tmp_path / "run", "train.steps=200", "checkpoint.every=10") as supervised:
        supervised.wait_for_step(25)  # spikes are detected only after these
        for known, (fault, rank) in enumerate((("nan", 1), ("inf", 0), ("gradient", 1), ("spike", 1))):
            inject_fault(supervised, rank, fault)
            incident = next_fault(supervised, known)
            assert (incident.cause, incident.action) == ("numeric", "skipped")
            if fault != "gradient":  # an all-reduced gradient does not tell which rank caused it
                assert incident.suspects == (rank,)
                assert incident.evidence["sample_ids"] == samples_of(supervised.run, incident.step, rank)
            supervised.wait_for_step(incident.step + 10)
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    assert supervised.attempts() == 1
    skipped = [each["step"] for each in lines(supervised.run.metrics) if each.get("skipped")]
    assert skipped == [each.step for each in supervised.faults]
    assert max(complete_steps(supervised.run.checkpoints)) == 200  # the last checkpoint is complete
    assert all(each["loss"] < 10 for each in lines(supervised.run.metrics)[-5:])


@pytest.mark.parametrize("kind", ["raise", "shape", "range"])
def test_a_bad_sample_is_quarantined_by_its_number(tmp_path: Path, kind: str) -> None:
    """Fault `bad-sample`."""
    settings = ("train.steps=40", "checkpoint.memory=1")
    first = Supervised.start(tmp_path / "first", *settings)
    first.__exit__()
    sample = samples_of(first.run, 20, 1)[2]
    with start_run(tmp_path / "run", *settings, pause=0.0, sample=f"{kind}:{sample}") as supervised:
        assert supervised.wait() == EXIT_DONE
    (incident,) = supervised.faults
    assert (incident.cause, incident.suspects, incident.action) == ("data", (1,), "quarantined")
    assert incident.evidence["sample_ids"] == [sample]
    assert [each["sample"] for each in lines(supervised.run.quarantine)] == [sample]
    assert [each["step"] for each in lines(supervised.run.metrics) if each.get("quarantined")] == [20]


def test_loaders_that_die_or_hang_are_replaced_without_losing_a_sample(tmp_path: Path) -> None:
    """Fault `loader-killed`: only the rank of the loader notices."""
    settings = ("train.steps=120", "data.workers=1", "data.timeout_seconds=2", "faults.hang_seconds=20")
    with start_run(tmp_path / "run", *settings) as supervised:
        for step, number in ((15, signal.SIGKILL), (40, signal.SIGSTOP)):
            supervised.wait_for_step(step)
            (loader,) = psutil.Process(supervised.pid(1)).children()
            os.kill(loader.pid, number)
            supervised.wait_for_step(supervised.step() + 10)
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    assert supervised.attempts() == 1
    assert supervised.faults == []
    assert_as_undisturbed(supervised.run, tmp_path / "calm")


@pytest.mark.parametrize("fault", ["barrier", "shape"])
def test_mismatched_collectives_are_reported_with_their_call_sites(tmp_path: Path, fault: str) -> None:
    """Fault `collective-mismatch`: one of three ranks calls another collective than the others."""
    settings = ("train.steps=100", "train.global_batch=12", "checkpoint.memory=1")
    with start_run(tmp_path / "run", *settings, ranks=3) as supervised:
        supervised.wait_for_step(15)
        inject_fault(supervised, 1, fault)
        incident = supervised.wait_for_fault(0, 40)
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    print(f"{fault}: {incident.cause} {incident.suspects}, {incident.cost}: {incident.what}")
    assert incident.cause == "mismatch"
    assert 1 in incident.suspects
    assert incident.action == "restarted"
    assert incident.cost["seconds_to_detect"] < NAME_SECONDS
    assert incident.cost["seconds_to_recover"] < RESUME_SECONDS
    assert "plugin.py" in incident.evidence["sites"]["1"]


def test_a_flipped_bit_of_one_replica_is_found_and_undone(tmp_path: Path) -> None:
    """Fault `bit-flip`: replicas are compared every 10 steps, and the run restores a state where they were equal."""
    settings = ("train.steps=100", "train.global_batch=12", "checkpoint.memory=1", "checkpoint.every=10")
    rewinds = ("faults.not_finite=rewind", "checkpoint.keep=8", "faults.shard_check=0")
    with start_run(tmp_path / "run", *settings, *rewinds, ranks=3, compare="10") as supervised:
        supervised.wait_for_step(33)
        inject_fault(supervised, 2, "flip")
        incident = next_fault(supervised, 0)
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    assert (incident.cause, incident.suspects, incident.action) == ("numeric", (2,), "rewound")
    assert incident.step % 10 == 0
    assert incident.evidence["keys"]
    assert supervised.attempts() == 1
    assert_as_undisturbed(supervised.run, tmp_path / "calm")


@pytest.mark.parametrize("sharding", ["parameters", "optimizer"])
@pytest.mark.parametrize("memory", ["1", "auto"])
def test_a_flipped_bit_of_a_shard_is_found_before_the_next_update(tmp_path: Path, sharding: str, memory: str) -> None:
    """Fault `bit-flip` where no other rank has a copy of the shard."""
    mesh = ("plan.mesh.dp_replicate=1", "plan.mesh.dp_shard=2", f"plan.sharding={sharding}")
    settings = ("train.steps=80", f"checkpoint.memory={memory}", "faults.shard_check=1.0")
    with start_run(tmp_path / "run", *mesh, *settings) as supervised:
        supervised.wait_for_step(33)
        inject_fault(supervised, 1, "flip")
        incident = next_fault(supervised, 0)
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    print(f"{incident.what}: {incident.cost} {supervised.events(0, 'rewind')}")
    assert (incident.cause, incident.suspects, incident.action) == ("numeric", (1,), "rewound")
    assert incident.evidence["keys"]
    (rewind,) = supervised.events(0, "rewind")
    (bound, *_) = [each["data"]["steps"] for each in reversed(supervised.events(0, "loss_bound"))]
    assert incident.step - rewind["data"]["to_step"] <= 2 + bound
    assert supervised.attempts() == 1
    assert_as_undisturbed(supervised.run, tmp_path / "calm")
