"""Bad numbers, bad samples, loaders that die, collectives that do not match, weights that differ. F28 to F32."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.chaos.fault_run import NAME_SECONDS, RESUME_SECONDS, assert_as_undisturbed, hurry, order, sail
from tests.fault.harness import Supervised, lines, wait_for
from trimaran.checkpoint.step_dirs import steps
from trimaran.core import EXIT_DONE, Incident
from trimaran.data import TokenShards, cache_folder, positions, prepare, split
from trimaran.data.feed import DataShare
from trimaran.run import RunDirectory

pytestmark = pytest.mark.chaos


def samples_of(run: RunDirectory, step: int, rank: int) -> list[int]:
    """Return the samples that a rank works on at `step`, which counts from 1."""
    recipe, plan = run.read_recipe(), run.read_plan()
    training, _ = split(TokenShards.open(prepare(recipe.data, cache=cache_folder(os.environ))), recipe.data)
    share = DataShare(rank=rank, dp=plan.mesh.dp, micro_batch=plan.micro_batch, grad_accum=plan.grad_accum)
    return positions(recipe.train.seed, share.indices(step - 1).ravel(), len(training)).tolist()


def next_trouble(sailing: Supervised, known: int) -> Incident:
    return wait_for(lambda: [each for each in sailing.troubles[known:] if each.action], 30)[0]


def test_numbers_that_are_none_move_nothing_and_their_samples_are_known(tmp_path: Path) -> None:
    """F28: NaN and Inf in the loss, NaN in the gradient alone, and a loss that jumps."""
    with sail(tmp_path / "run", "train.steps=200", "checkpoint.every=10") as sailing:
        sailing.wait_for_step(25)  # before that, jumps are not called such
        for known, (fault, rank) in enumerate((("nan", 1), ("inf", 0), ("gradient", 1), ("spike", 1))):
            order(sailing, rank, fault)
            told = next_trouble(sailing, known)
            assert (told.cause, told.action) == ("numeric", "skipped")
            if fault != "gradient":  # which has nobody's name on it once it is summed
                assert told.suspects == (rank,)
                assert told.evidence["sample_ids"] == samples_of(sailing.run, told.step, rank)
            sailing.wait_for_step(told.step + 10)
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE
    assert sailing.attempts() == 1
    skipped = [each["step"] for each in lines(sailing.run.metrics) if each.get("skipped")]
    assert skipped == [each.step for each in sailing.troubles]
    assert max(steps(sailing.run.checkpoints)) == 200  # the last one, which no number that is none gets into
    assert all(each["loss"] < 10 for each in lines(sailing.run.metrics)[-5:])


@pytest.mark.parametrize("kind", ["raise", "shape", "range"])
def test_a_sample_that_cannot_be_used_is_left_out_by_its_number(tmp_path: Path, kind: str) -> None:
    """F29."""
    settings = ("train.steps=40", "checkpoint.memory=1")
    first = Supervised.start(tmp_path / "first", *settings)
    first.__exit__()
    sample = samples_of(first.run, 20, 1)[2]
    with sail(tmp_path / "run", *settings, pause=0.0, sample=f"{kind}:{sample}") as sailing:
        assert sailing.wait() == EXIT_DONE
    (told,) = sailing.troubles
    assert (told.cause, told.suspects, told.action) == ("data", (1,), "quarantined")
    assert told.evidence["sample_ids"] == [sample]
    assert [each["sample"] for each in lines(sailing.run.quarantine)] == [sample]
    assert [each["step"] for each in lines(sailing.run.metrics) if each.get("quarantined")] == [20]


def test_loaders_that_die_or_stand_still_are_replaced_and_no_sample_is_lost(tmp_path: Path) -> None:
    """F30: nobody but the rank's own loader has to notice."""
    settings = ("train.steps=120", "data.workers=1", "data.timeout_seconds=2", "faults.hang_seconds=20")
    with sail(tmp_path / "run", *settings) as sailing:
        for step, number in ((15, signal.SIGKILL), (40, signal.SIGSTOP)):
            sailing.wait_for_step(step)
            (loader,) = psutil.Process(sailing.pid(1)).children()
            os.kill(loader.pid, number)
            sailing.wait_for_step(sailing.step() + 10)
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE
    assert sailing.attempts() == 1
    assert sailing.troubles == []
    assert_as_undisturbed(sailing.run, tmp_path / "calm")


@pytest.mark.parametrize("fault", ["barrier", "shape"])
def test_collectives_that_do_not_match_are_named_with_where_they_were_called(tmp_path: Path, fault: str) -> None:
    """F31: one of three ranks calls something that the others do not."""
    settings = ("train.steps=100", "train.global_batch=12", "checkpoint.memory=1")
    with sail(tmp_path / "run", *settings, ranks=3) as sailing:
        sailing.wait_for_step(15)
        order(sailing, 1, fault)
        told = sailing.wait_for_trouble(0, 40)
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE
    print(f"{fault}: {told.cause} {told.suspects}, {told.cost}: {told.what}")
    assert told.cause == "mismatch"
    assert 1 in told.suspects
    assert told.action == "restarted"
    assert told.cost["seconds_to_detect"] < NAME_SECONDS
    assert told.cost["seconds_to_recover"] < RESUME_SECONDS
    assert "plugin.py" in told.evidence["sites"]["1"]


def test_a_flipped_bit_of_one_replica_is_found_and_undone(tmp_path: Path) -> None:
    """F32: replicas are compared every 10 steps here, and the run goes back to where they were equal."""
    settings = ("train.steps=100", "train.global_batch=12", "checkpoint.memory=1", "checkpoint.every=10")
    with sail(
        tmp_path / "run", *settings, "faults.not_finite=rewind", "checkpoint.keep=8", ranks=3, compare="10"
    ) as sailing:
        sailing.wait_for_step(33)
        order(sailing, 2, "flip")
        told = next_trouble(sailing, 0)
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE
    assert (told.cause, told.suspects, told.action) == ("numeric", (2,), "rewound")
    assert told.step % 10 == 0
    assert told.evidence["keys"]
    assert sailing.attempts() == 1
    assert_as_undisturbed(sailing.run, tmp_path / "calm")
