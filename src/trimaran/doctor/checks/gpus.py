"""GPUs: those that are wanted are here, of one kind, open to us, and nobody else is on them."""

from trimaran.core import show_bytes
from trimaran.doctor.checks.result import CheckInfo, CheckResult, Trouble
from trimaran.doctor.machine_facts import Facts, Gpu

LOOK = CheckInfo("H002", "GPUs")
OTHERS_SHARE = 0.05  # of a GPU's memory, from which on somebody else is at work there; a desktop takes less


def check(facts: Facts) -> CheckResult:
    """Say which GPUs there are, and what would keep a run from using them."""
    gpus, work = facts.gpus, facts.work
    if not gpus:
        if work and work.kind == "cuda":
            # Not a failure: GPUs of other makers have other tools, and who starts a run counts them.
            return LOOK.warn(f"the run wants {work.ranks} GPUs, and NVIDIA's driver shows none here",
                             "see `nvidia-smi`; without GPUs: --set cluster=auto")  # fmt: skip
        return LOOK.skipped("no NVIDIA GPU here: ranks are this machine's cores")
    troubles = [trouble for gpu in gpus for trouble in _troubles(gpu)]
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        troubles.append(Trouble(f"the node mixes {' and '.join(names)}", "choose equal ones with CUDA_VISIBLE_DEVICES"))
    healthy = f"{len(gpus)} x {names[0]}, {show_bytes(min(gpu.memory for gpu in gpus))} each, nobody on them"
    return LOOK.worst(
        troubles, healthy, gpus=[{"index": gpu.index, "name": gpu.name, "uuid": gpu.uuid} for gpu in gpus]
    )


def _troubles(gpu: Gpu) -> list[Trouble]:
    name = f"GPU {gpu.index}"
    found: list[Trouble] = []
    if gpu.memory and gpu.used > OTHERS_SHARE * gpu.memory:
        found.append(Trouble(f"{name}: {show_bytes(gpu.used)} of {show_bytes(gpu.memory)} are in use",
                             "see `nvidia-smi` for who holds them, or choose with CUDA_VISIBLE_DEVICES"))  # fmt: skip
    if gpu.compute_mode.startswith("Prohibited"):
        found.append(Trouble(f"{name}: the compute mode prohibits programs",
                             f"nvidia-smi -i {gpu.index} -c DEFAULT", is_fatal=True))  # fmt: skip
    if gpu.mig == "Enabled":
        found.append(Trouble(f"{name} is cut into MIG slices, which cannot reach each other",
                             f"nvidia-smi -i {gpu.index} -mig 0, or one slice a run"))  # fmt: skip
    if gpu.reset_required:
        found.append(Trouble(f"{name} asks to be reset", f"nvidia-smi -i {gpu.index} -r", is_fatal=True))
    return found
