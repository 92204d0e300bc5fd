"""What the sections `faults` and `resume` share: supervised runs on shared GPUs, and comparison with a calm run."""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.numpy import load_file

from tests.chaos.fault_run import remove_pause
from tests.fault.harness import ROOT, Supervised, lines
from trimaran.core import EXIT_DONE
from trimaran.launch import SHARE_GPUS
from trimaran.runs import RunDirectory

PAUSE = 0.05
RUN_SECONDS = 150.0
PLANS: Mapping[str, tuple[str, ...]] = {
    "dp_shard 2": ("plan.mesh.dp_replicate=1", "plan.mesh.dp_shard=2", "plan.sharding=parameters"),
    "tp 2 x pp 2": ("plan.mesh.dp_replicate=1", "plan.mesh.tp=2", "plan.mesh.pp=2", "plan.grad_accum=2"),
}
SETTINGS = ("plan.precision=fp32", "plan.compile=false", "checkpoint.memory=1")


def cluster_setting(ranks: int, backend: str, *, nodes: int = 1) -> str:
    device = "H200" if backend == "nccl" else "cpu"
    return f"cluster={nodes}x{ranks // nodes}x{device}"


def environment(backend: str) -> dict[str, str]:
    """Return the variables of a supervisor whose ranks share the GPU and take faults from `tests.nccl.plugin`."""
    shared = {SHARE_GPUS: "1"} if backend == "nccl" else {"CUDA_VISIBLE_DEVICES": ""}
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])
    return {
        "TRIMARAN_TEST_PLUGIN": "tests.nccl.plugin",
        "TRIMARAN_TEST_PAUSE": str(PAUSE),
        "PYTHONPATH": paths,
        **shared,
    }


def start_supervised(path: Path, plan: str, ranks: int, backend: str, *settings: str) -> Supervised:
    ours = (cluster_setting(ranks, backend), *PLANS[plan], *SETTINGS, *settings)
    return Supervised.start(path, *ours, ranks=ranks, extra=environment(backend))


def finish(supervised: Supervised) -> None:
    """Let a run end without pauses; fail if it does not end well."""
    remove_pause(supervised)
    code = supervised.wait(RUN_SECONDS)
    assert code == EXIT_DONE, f"exit code {code}: {[each.what for each in supervised.incidents]}"


def assert_equals_calm_run(run: RunDirectory, calm: RunDirectory) -> None:
    """Fail unless losses at every step and final weights are those of a run without faults, bit for bit."""
    ours, theirs = ({each["step"]: each["loss"] for each in lines(one.metrics)} for one in (run, calm))
    assert ours.keys() == theirs.keys()
    wrong = [step for step in ours if ours[step] != theirs[step]]
    assert not wrong, f"losses differ from step {wrong[0]}: {ours[wrong[0]]} against {theirs[wrong[0]]}"
    weights, expected = (load_file(one.model / "model.safetensors") for one in (run, calm))
    assert weights.keys() == expected.keys()
    assert not [name for name in weights if (weights[name] != expected[name]).any()]


def train_calm_run(path: Path, plan: str, ranks: int, backend: str, *settings: str) -> RunDirectory:
    with start_supervised(path, plan, ranks, backend, *settings) as supervised:
        finish(supervised)
        assert not supervised.faults, [each.what for each in supervised.faults]
    return supervised.run
