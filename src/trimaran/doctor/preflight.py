"""The checklist of a machine: which looks there are, and what stands in the way of a run."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from trimaran.core import Bytes, Plan, UserError
from trimaran.doctor.checks import (
    bandwidth,
    clock,
    clocks,
    disk,
    disk_speed,
    ecc,
    environment,
    gpus,
    limits,
    load,
    memory,
    network,
    pairs,
    ports,
    products,
    shared_memory,
    sums,
    topology,
    versions,
)
from trimaran.doctor.checks.result import CheckResult
from trimaran.doctor.machine_facts import Facts, Kind, Work
from trimaran.doctor.read_machine import read_facts

Check = Callable[[Facts], CheckResult]
HERE = "this machine"

CHECKS: tuple[Check, ...] = (
    versions.check,
    gpus.check,
    ecc.check,
    clocks.check,
    topology.check,
    network.check,
    environment.check,
    shared_memory.check,
    limits.check,
    disk.check,
    disk_speed.check,
    clock.check,
    ports.check,
    memory.check,
    products.check,
    sums.check,
    bandwidth.check,
    pairs.check,
    load.check,
)
# What a run is refused for: looks that take no time, and whose failure means that it could not work.
GATE: tuple[Check, ...] = (
    versions.check,
    gpus.check,
    environment.check,
    limits.check,
    ports.check,
    memory.check,
)


def examine(facts: Facts, checks: tuple[Check, ...] = CHECKS) -> list[CheckResult]:
    """Return the answer of each check, in the order of the list."""
    return [check(facts) for check in checks]


def look_before(environment: Mapping[str, str], plan: Plan, *, kind: Kind, nodes: int = 1, where: str = HERE) -> None:
    """Raise when `plan` on `nodes` nodes could not work on this one, as far as a moment's look shows."""
    prediction = plan.prediction
    need = (prediction.device_bytes or prediction.peak_bytes) if prediction else Bytes(0)
    error = prediction.error if prediction else 0.0
    work = Work(kind=kind, ranks=plan.mesh.world_size, nodes=nodes, device_bytes=need, error=error)
    refuse_unfit(replace(read_facts(environment, quick=True, gpus=kind == "cuda"), work=work), where=where)


def refuse_unfit(facts: Facts, *, where: str = HERE) -> None:
    """Raise when a run could not work on this machine. Warnings are for `trimaran doctor`."""
    for result in examine(facts, GATE):
        if result.status == "fail":
            raise UserError(result.code, result.what, where=where,
                            fix=f"{result.fix}; or go on with --no-check")  # fmt: skip
