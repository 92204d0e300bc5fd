"""The environment variables of the ranks of a plan."""

import os
from collections.abc import Mapping

from trimaran.core import Plan
from trimaran.machine import openmp_threads
from trimaran.runs.gloo_listeners import LAZY_CONNECTIONS

OPENMP = "OMP_NUM_THREADS"
# With more ranks, gloo connects two of them when they first communicate. All at once, N ranks ask the store 2 N^2
# times: 13 s for 256 ranks, hours for 8,192.
MAX_RANKS_ALL_CONNECTED = 128
# The variables that torch reads its allocator settings from. The second and third are older names of the first.
EXPANDABLE_SEGMENTS = "expandable_segments:True"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def uses_expandable_segments(plan: Plan) -> bool:
    """Return whether the CUDA allocator gets expandable segments for this plan from the start.

    Other plans allocate the same blocks at every step, and do not fragment memory.
    """
    return not (plan.sharding == "none" and plan.mesh.pp == 1 and plan.recompute == "none" and plan.offload == "none")


def allocator_settings(plan: Plan) -> dict[str, str]:
    """Return the settings of the CUDA allocator for `plan`; empty if the defaults are fine."""
    return {ALLOCATOR_VARIABLES[0]: EXPANDABLE_SEGMENTS} if uses_expandable_segments(plan) else {}


# Of `faults.debug`: all ranks compare every collective before it runs, libraries log what they do, the host waits for
# every kernel, and errors of C++ code have their stack.
DEBUG_VARIABLES = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "NCCL_DEBUG": "INFO",
    "CUDA_LAUNCH_BLOCKING": "1",
}


def worker_environment(
    outer: Mapping[str, str], plan: Plan, *, on_cpu: bool, deterministic: bool, debug: bool = False
) -> dict[str, str]:
    """Return the variables of the ranks of `plan` on top of `outer`. Variables that the user has set in `outer` win,
    except that a run on CPUs hides all GPUs."""
    cores = len(os.sched_getaffinity(0))
    ours = {
        OPENMP: str(max(1, cores // plan.mesh.world_size)),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "KINETO_LOG_LEVEL": "6",  # otherwise the profiler logs its starts and stops to the rank's log
    }
    if plan.mesh.world_size > MAX_RANKS_ALL_CONNECTED:
        ours[LAZY_CONNECTIONS] = "1"
    if debug:
        ours |= DEBUG_VARIABLES
    if deterministic:
        ours["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if on_cpu:
        ours |= plan.engine_traits.variables_on_cpu
    elif not any(name in outer for name in ALLOCATOR_VARIABLES):
        ours |= allocator_settings(plan)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    kept = without_unusable(outer)
    return {name: value for name, value in ours.items() if name not in kept} | hidden


def without_unusable(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without an OMP_NUM_THREADS that OpenMP cannot read: H007 reports it, `--no-check` skips."""
    is_usable = openmp_threads(environment.get(OPENMP)) is not None
    return {name: value for name, value in environment.items() if name != OPENMP or is_usable}
