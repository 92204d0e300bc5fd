"""How many bytes one rank holds: the terms, and the moment at which they are most."""

from operator import attrgetter
from typing import NamedTuple

from trimaran.core import Bytes, Plan
from trimaran.cost.activation_memory import kept_on
from trimaran.cost.job import Job
from trimaran.cost.loss_kind import SUM_BYTES, loss_of, piece_rows
from trimaran.cost.memory_inputs import MemoryInputs, memory_inputs_of
from trimaran.cost.rank_part import RankPart, distinct_parts
from trimaran.cost.states import PINNED, States, states_of
from trimaran.hardware import Cluster
from trimaran.models import Tower

# glibc's heap has holes: resident memory grows by 1.6 bytes for each byte of activations (1.0 with mmap alone).
HEAP_SHARE = 0.6
# An interpreter with torch, its kernels loaded, and the trainer.
PROCESS_BYTES = 330 * 2**20
# cuBLAS takes its scratch space from torch's allocator: 32 MiB for forward's thread and for backward's.
WORKSPACE_BYTES = 2 * 2**25
# Segments of torch's allocator are never quite full, however little passes.
SEGMENT_BYTES = 2**28
# A CUDA context with cuBLAS (0.92 GiB beside the allocator on an H200; bigscience saw 1.1 on V100, 1.5 on A100), and
# nccl's buffers for each group of ranks that meet, a guess: runs with two groups had 2 GiB for all of it, and ran. No
# tensors, so in no peak.
CONTEXT_BYTES = 15 * 2**26
COMMUNICATOR_BYTES = 3 * 2**27


class Memory(NamedTuple):
    """Bytes of one rank. `terms` add up to `peak`, the figure that the stack's own log would show.

    `reserved` and `device` are of the fullest rank: what its allocator takes, and what its device must have. `host` is
    what one node must have for what is offloaded. `runs` is False where a rank of the pipeline would have nothing to
    do, or the stack refuses so few micro-batches.
    """

    terms: dict[str, Bytes]
    peak: Bytes
    reserved: Bytes
    device: Bytes
    host: Bytes
    runs: bool = True


class PeakMoment(NamedTuple):
    """What comes and goes, in bytes, when a rank holds the most of it."""

    activations: float = 0
    logits: float = 0
    casts: float = 0
    gathered: float = 0
    gradients: float = 0
    update: float = 0


class RankLoad(NamedTuple):
    """A rank at its fullest: what its tensors hold, and what its allocator takes for them, usually and at worst."""

    states: States
    moment: PeakMoment
    peak: float
    reserved: float
    worst: float
    host: float


def memory_of(job: Job, cluster: Cluster, plan: Plan) -> Memory:
    """Return what the plan holds at the fullest moment of a step."""
    scene = memory_inputs_of(job, cluster, plan)
    gathered = scene.profile.regathers[0] if scene.tp > 1 and scene.pp == 1 else 0
    found = _memory(scene, cluster, gathered)
    if gathered and found.device > cluster.device.memory_bytes:
        return _memory(scene, cluster, 0)  # to gather again is what people switch on when memory runs out
    return found


def _memory(scene: MemoryInputs, cluster: Cluster, gathered: float) -> Memory:
    parts, works = distinct_parts(scene.job.outline, scene.plan, scene.job.seq_len, scene.profile.split)
    loads = [_load(scene, part, gathered) for part in parts]
    fullest = max(loads, key=attrgetter("worst"))
    rank, log = scene.profile.reports
    terms = _terms(scene, fullest if rank == "fullest" else loads[0 if rank == "first" else -1], log)
    around = 0
    if not scene.cpu:
        groups = (scene.tp > 1) + (scene.pp > 1) + (scene.data > 1)
        around = CONTEXT_BYTES + COMMUNICATOR_BYTES * (1 + groups if groups else 0)
    return Memory(
        terms=terms,
        peak=Bytes(sum(terms.values())),
        reserved=Bytes(int(fullest.reserved)),
        device=Bytes(int(fullest.worst) + around),
        host=Bytes(int(cluster.devices_per_node * max(load.host for load in loads))),
        runs=works,
    )


def _terms(scene: MemoryInputs, load: RankLoad, log: str) -> dict[str, Bytes]:
    """Return the load by name. On a CPU the peak is resident memory: the process and the holes in its heap count."""
    states, moment = load.states, load.moment
    terms = {"weights": states.weights, "masters": states.masters, "optimizer": states.optimizer} | moment._asdict()
    if scene.cpu:
        terms |= {"heap": HEAP_SHARE * (moment.activations + moment.logits), "process": PROCESS_BYTES}
    else:
        terms |= {"workspace": WORKSPACE_BYTES, "holes": load.reserved - load.peak if log == "reserved" else 0}
    return {name: Bytes(int(size)) for name, size in terms.items() if size >= 1}


def _load(scene: MemoryInputs, part: RankPart, gathered: float) -> RankLoad:
    """Return the rank's fullest moment, with what is always there.

    That is the loss of the last micro-batch, when all activations are alive; the first or the last layer of backward,
    when one is computed again and the gradients begin or are complete; the sum of the last gradient; or the update.
    """
    states, kept, flying = states_of(scene, part), kept_on(scene, part, gathered=gathered), part.flying
    head, casts, host = head_of(scene, part), kept.casts, states.host
    alive, rest = kept.layers * flying, kept.layers * max(0, flying - 1)
    if scene.offload == "activations":  # the layer at work alone, and the weights that its products were given
        host, alive, rest, casts = host + PINNED * alive, kept.one, kept.one, 0
    first, cast = alive + head.activations + kept.passing, casts + head.casts
    working = kept.again + kept.back + kept.passing
    left = 0 if states.working else _left(scene, part, head)  # what is sharded has room for its root's gradients there
    moment = max(
        (first, head.logits, cast, states.gathered, states.early + head.gradients, 0),
        (alive + working, 0, cast, states.working, states.early + left, 0),
        (rest + working, 0, 0, states.working, states.gradients, 0),
        (rest, 0, 0, 0, states.gradients + states.twice, 0),
        (0, 0, 0, 0, states.gradients, states.passing),
        key=sum,
    )
    moment = PeakMoment(*moment)
    held = states.weights + states.masters + states.optimizer + sum(moment)
    passing = moment.activations + moment.logits
    if scene.cpu:
        held += HEAP_SHARE * passing + PROCESS_BYTES
        return RankLoad(states, moment, held, held, held, host)
    held += WORKSPACE_BYTES
    alone, sharded, worst = scene.profile.holes
    usual = alone if scene.shards == 1 else sharded
    passing += moment.casts + moment.gathered
    taken = held + SEGMENT_BYTES
    worst = usual if scene.pp * scene.tp * scene.data == 1 else max(usual, worst)
    return RankLoad(states, moment, held, taken + usual * passing, taken + worst * passing, host)


def head_of(scene: MemoryInputs, part: RankPart) -> PeakMoment:
    """Return what the last norm and the head keep, and the logits while a loss turns into a gradient.

    GPipe has the logits of all micro-batches waiting. Tensor parallelism splits the vocabulary. A loss that is fused
    with the head has the gradients of both right then, in place of anything that waits.
    """
    if (tower := part.head_tower) is None:
        return PeakMoment()
    positions, plan = scene.job.positions(tower, scene.plan) / scene.tp, scene.plan
    whole = scene.profile.weight == 4 or (scene.halves and (tower.tied or tower.frozen))
    casts = scene.width == 2 and whole and scene.job.sharding_of(tower, plan) == "none"
    kept = PeakMoment(
        activations=positions * scene.saved.stream * tower.hidden,
        casts=2 * tower.head_parameters / scene.tp if casts else 0,
    )
    if (loss := loss_of(scene.job, plan)) != "logits":
        return kept._replace(**_fused(scene, tower, chunked=loss == "chunked"))
    at_loss, waits = scene.profile.logits
    if scene.pp > 1 and plan.pipeline.schedule == "gpipe":
        at_loss += (plan.grad_accum - 1) * waits
    return kept._replace(logits=positions * at_loss * tower.outputs)


def _left(scene: MemoryInputs, part: RankPart, head: PeakMoment) -> float:
    """Return what is left of the head's gradients when backward comes to the layers: no sum in fp32 beside halves."""
    if not scene.halves or part.head_tower is None or part.head_tower.tied:
        return head.gradients
    return min(head.gradients, scene.width * part.head_tower.head_parameters)


def _fused(scene: MemoryInputs, tower: Tower, *, chunked: bool) -> dict[str, float]:
    """Return the logits of a fused loss, all or a piece of them, and the gradients of the head and of its input.

    Without our kernel, on a CPU, the scores pass through fp32 beside the logits.
    """
    rows = scene.job.positions(tower, scene.plan)
    at_once = piece_rows(rows, tower.outputs, scene.width) if chunked else rows
    each = scene.width + SUM_BYTES * scene.cpu
    summed = SUM_BYTES if chunked and at_once < rows else scene.width
    weight = 0 if tower.frozen else summed * tower.head_parameters
    return {"logits": each * at_once * tower.outputs, "gradients": scene.width * rows * tower.hidden + weight}
