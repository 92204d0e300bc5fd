"""The list of machine checks, and those that refuse a run."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from trimaran.core import Bytes, Plan, UserError
from trimaran.machine.checks import between_nodes, devices, host, software
from trimaran.machine.checks.machine_facts import CheckResult, Facts, Kind, RunRequirements
from trimaran.machine.checks.read_machine import read_facts

Check = Callable[[Facts], CheckResult]
THIS_MACHINE = "this machine"

CHECKS: tuple[Check, ...] = (
    software.installed_versions,  # H001: torch, CUDA, driver and NCCL are compatible, without a known bug
    devices.usable_gpus,  # H002: the GPUs the run needs are present, equal, usable and free
    devices.memory_errors,  # H003: uncorrected ECC memory errors of GPUs
    devices.gpu_clocks,  # H004: GPUs that are throttled, limited below their defaults, or on a narrow PCIe link
    devices.gpu_links,  # H005: NVLink between all GPUs that have it, with equal widths, and peer access between GPUs
    between_nodes.network_cards,  # H006: network cards are up, equally fast, and close to the GPUs and to our cores
    software.environment_variables,  # H007: no variable slows a run down, breaks it or has no effect
    host.shared_memory,  # H008: /dev/shm is large enough for NCCL, which uses it between GPUs without peer access
    host.process_limits,  # H009: ulimits for open files, processes, memory, file sizes and core dumps
    host.disk_space,  # H010: free disk space for the run's checkpoints, and a writable run directory
    host.disk_speed,  # H011: the disk writes a checkpoint before the next one is due
    between_nodes.node_clocks,  # H012: the nodes' clocks agree
    host.ports,  # H013: the loopback interface works, and the recipe's ports are free
    host.plan_memory,  # H014: the recipe's plan fits into the memory that is free now
    devices.matmul_speed,  # H015: matmul throughput of each device, compared with its neighbours and its device model
    devices.all_reduce_result,  # H016: every rank gets the exact all-reduce result
    devices.all_reduce_speed,  # H017: measured all-reduce bus bandwidth, compared with what the links should give
    between_nodes.node_pairs,  # H018: no node is slow or silent with every partner
    host.cpu_cores,  # H019: the container's CPU quota, and cores that other programs use
)
# Checks that refuse a run: they are fast, and if one fails the run cannot work.
BLOCKING_CHECKS: tuple[Check, ...] = (
    software.installed_versions,
    devices.usable_gpus,
    software.environment_variables,
    host.process_limits,
    host.ports,
    host.plan_memory,
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
    refuse_failed_checks(replace(facts, requirements=requirements), where=where)


def refuse_failed_checks(facts: Facts, *, where: str = THIS_MACHINE) -> None:
    """Raise UserError if a blocking check fails. Warnings are left to `trimaran doctor`."""
    for result in run_checks(facts, BLOCKING_CHECKS):
        if result.status == "fail":
            raise UserError(result.code, result.what, where=where,
                            fix=f"{result.fix}; or skip this check with --no-check")  # fmt: skip
