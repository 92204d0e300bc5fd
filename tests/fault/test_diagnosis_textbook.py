"""The two exercises of the textbook, with real runs: periodic utilisation dips, and a speed-up of 5.2 on 8 ranks.

Compute is simulated by sleeping in proportion to the rows, so that eight ranks on two cores run as on eight machines.
"""

from functools import partial
from pathlib import Path

import pytest

from tests.diagnosed_runs import findings, in_slow_network, measured, recipe_of, train
from tests.fault.harness import Supervised
from tests.fault.injections import compute_slowly, load_slowly, save_slowly
from trimaran.app import main
from trimaran.core import EXIT_DONE, Recipe
from trimaran.doctor import patch_settings
from trimaran.models import outline_if_known
from trimaran.runs import RunDirectory

pytestmark = pytest.mark.chaos


STEP = 1.6  # seconds
ROWS, EVERY = 4, 5  # rows of a rank, steps between checkpoints
INJECTED = {"comm": 0.12, "imbalance": 0.07, "sync": 0.06, "data": 0.10}  # of a step, which leaves 0.65 for compute
TOLERANCE = 0.04  # of a step: two cores run eight ranks
TINY = (
    "model.shape={layers: 1, hidden: 64, heads: 4, kv_heads: 2, ffn: 128}", "data.seq_len=16", "train.steps=16",
    "checkpoint.memory=0", f"plan.micro_batch={ROWS}", "plan.grad_accum=1",
)  # fmt: skip


def rate_for(recipe: Recipe, seconds: float) -> str:
    """Return the loopback rate at which the gradient all-reduce of 8 ranks takes so long: each sends 14/8 of it."""
    outline = outline_if_known(recipe.model, recipe.data)
    assert outline is not None
    return f"{14 * 4 * 8 * outline.trained_parameters / seconds:.0f}bit"


def test_a_speed_up_of_5_2_on_8_ranks_is_split_into_its_causes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank, then eight with a slow network, a slow shared disk and one slow rank."""
    one = recipe_of("cluster=1xcpu", f"train.global_batch={ROWS}", "checkpoint.every=0", *TINY)
    compute = partial(compute_slowly, 0.65 * STEP / ROWS, late={3: INJECTED["imbalance"] * STEP})
    alone = train(one, tmp_path / "1", compute)
    load = partial(load_slowly, STEP / ROWS)  # exactly as fast as eight ranks consume: the rest of a step is waiting
    save = partial(save_slowly, INJECTED["sync"] * STEP * EVERY)
    eight = recipe_of(
        "cluster=8xcpu", "plan.mesh.dp_replicate=8", f"train.global_batch={8 * ROWS}", f"checkpoint.every={EVERY}",
        "checkpoint.asynchronous=false", *TINY,
    )  # fmt: skip
    rate = rate_for(eight, INJECTED["comm"] * STEP)
    run = in_slow_network(rate, train, eight, tmp_path / "8", compute, load, save)
    found = findings(run, against=alone)["F014"]
    lost = found.evidence["lost"]
    assert {name: lost[name] for name in INJECTED} == pytest.approx(INJECTED, abs=TOLERANCE)
    assert abs(lost["compute"]) < TOLERANCE
    assert found.evidence["speedup"] == pytest.approx(5.2, abs=8 * TOLERANCE)
    faster = 8 * measured(alone).step / measured(run).step
    assert found.evidence["speedup"] == pytest.approx(faster, abs=0.02), "what is lost is all that is missing"
    assert found.culprit == "comm"
    assert found.patch == {"checkpoint.asynchronous": True}, "the patch fixes the largest part that a setting can fix"
    assert main(["doctor", str(run.path), "--against", str(alone.path)]) == 0
    assert f"F014 warning: {found.verdict}" in capsys.readouterr().out


SLOW_SETTINGS = (
    "train.steps=36", "train.save=false", "data.workers=1", "train.global_batch=4", "plan.micro_batch=1",
    "plan.grad_accum=4", "checkpoint.every=10", "checkpoint.asynchronous=false",
    "checkpoint.memory=0", "telemetry.sample_seconds=0.5",
)  # fmt: skip


def slow_run(path: Path, *settings: str) -> RunDirectory:
    """Train with 100 ms per micro-batch of two layers, 160 ms of CPU per loaded row and a slow fsync."""
    extra = {"TRIMARAN_TEST_PLUGIN": "tests.fault.slow_rank", "TRIMARAN_TEST_SLOW_SECONDS": "0.05 0 0.16 0.12"}
    with Supervised.start(path, *SLOW_SETTINGS, *settings, ranks=1, extra=extra) as supervised:
        assert supervised.wait() == EXIT_DONE
    return supervised.run


def test_dips_every_10_steps_and_busy_loaders_are_diagnosed(tmp_path: Path) -> None:
    """Utilisation of about 70 %, and a loader at 100 % of a core. The rank sleeps instead of computing."""
    run = slow_run(tmp_path / "run")
    assert 0.6 < measured(run).fraction("compute") < 0.9
    found = findings(run)
    assert {"F001", "F006", "F007"} <= found.keys()
    assert found["F001"].culprit == "1 loader process"
    assert found["F001"].evidence["loader_busy"] > 0.4  # 1.0, unless other processes use the core
    assert found["F001"].patch or "no free cores" in found["F001"].fix, "depends on the number of cores"
    assert (found["F007"].evidence["every_steps"], found["F007"].culprit) == (10, "synchronous checkpoints")
    assert found["F007"].patch == {"checkpoint.asynchronous": True}
    assert found["F006"].patch == {"plan.micro_batch": 4, "plan.grad_accum": 1}
    settings = [each for code in ("F006", "F007") for each in patch_settings(found[code].patch)]
    fixed = slow_run(tmp_path / "fixed", *settings, "data.workers=3")  # the patch on a machine with more cores
    assert measured(fixed).step < 0.7 * measured(run).step
    assert not {"F006", "F007"} & findings(fixed).keys()
