"""The list of machine checks, and those that refuse a run."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from trimaran.core import Bytes, Plan, UserError
from trimaran.doctor.checks import (
    all_reduce,
    all_reduce_speed,
    cpu_cores,
    disk,
    disk_speed,
    ecc,
    environment,
    gpu_clocks,
    gpus,
    limits,
    matmul,
    memory,
    network,
    node_clocks,
    node_pairs,
    ports,
    shared_memory,
    topology,
    versions,
)
from trimaran.doctor.checks.result import CheckResult
from trimaran.doctor.machine_facts import Facts, Kind, RunRequirements
from trimaran.doctor.read_machine import read_facts

Check = Callable[[Facts], CheckResult]
THIS_MACHINE = "this machine"

CHECKS: tuple[Check, ...] = (
    versions.check,
    gpus.check,
    ecc.check,
    gpu_clocks.check,
    topology.check,
    network.check,
    environment.check,
    shared_memory.check,
    limits.check,
    disk.check,
    disk_speed.check,
    node_clocks.check,
    ports.check,
    memory.check,
    matmul.check,
    all_reduce.check,
    all_reduce_speed.check,
    node_pairs.check,
    cpu_cores.check,
)
# Checks that refuse a run: they are fast, and if one fails the run cannot work.
BLOCKING_CHECKS: tuple[Check, ...] = (
    versions.check,
    gpus.check,
    environment.check,
    limits.check,
    ports.check,
    memory.check,
)


def run_checks(facts: Facts, checks: tuple[Check, ...] = CHECKS) -> list[CheckResult]:
    """Return the result of each check, in the order of the list."""
    return [check(facts) for check in checks]


def check_before_run(
    environment: Mapping[str, str], plan: Plan, *, kind: Kind, nodes: int = 1, where: str = THIS_MACHINE
) -> None:
    """Raise UserError if a fast check shows that `plan` on `nodes` nodes cannot work on this node."""
    prediction = plan.prediction
    need = (prediction.device_bytes or prediction.peak_bytes) if prediction else Bytes(0)
    error = prediction.error if prediction else 0.0
    requirements = RunRequirements(kind=kind, ranks=plan.mesh.world_size, nodes=nodes, device_bytes=need, error=error)
    facts = read_facts(environment, quick=True, gpus=requirements.needs_gpus)
    facts = replace(facts, requirements=requirements)
    refuse_failed_checks(facts, where=where)


def refuse_failed_checks(facts: Facts, *, where: str = THIS_MACHINE) -> None:
    """Raise UserError if a blocking check fails. Warnings are left to `trimaran doctor`."""
    for result in run_checks(facts, BLOCKING_CHECKS):
        if result.status == "fail":
            raise UserError(result.code, result.what, where=where,
                            fix=f"{result.fix}; or skip this check with --no-check")  # fmt: skip
