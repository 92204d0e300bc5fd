"""What one rank has of a network that is cut into stages, slices and experts."""

from dataclasses import dataclass

from trimaran.core import Plan
from trimaran.models import ModelSpec, stage_ranges, stages_of_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The layers and parameters of one rank, before they are sharded. Experts are counted apart: they shard elsewhere.

    `flying` is for how many micro-batches at once it keeps the activations of its layers; more than one in a pipeline.
    """

    layers: int
    dense: int
    experts: int
    root: int  # of `dense`, what lies in no layer: embedding, last norm, head
    has_head: bool
    flying: float

    @property
    def parameters(self) -> int:
        return self.dense + self.experts

    @property
    def layer(self) -> int:
        """Parameters of one layer here."""
        return (self.parameters - self.root) // max(1, self.layers)


def parts_of(spec: ModelSpec, plan: Plan, *, seq_len: int) -> tuple[Part, ...]:
    """Return what each rank of the pipeline has; without a pipeline, one. All else that is split is split alike."""
    ranges = stage_ranges(spec, plan, seq_len=seq_len)
    return tuple(_part(spec, plan, ranges, pp_rank) for pp_rank in range(plan.mesh.pp))


def distinct_parts(spec: ModelSpec, plan: Plan, *, seq_len: int) -> tuple[Part, ...]:
    """Return the parts that differ; of those that differ only in what is in flight, the fullest."""
    fullest: dict[tuple[int, int, bool], Part] = {}
    for part in parts_of(spec, plan, seq_len=seq_len):
        alike = (part.layers, part.dense, part.has_head)
        if alike not in fullest or fullest[alike].flying < part.flying:
            fullest[alike] = part
    return tuple(fullest.values())


def _part(spec: ModelSpec, plan: Plan, ranges: tuple[range, ...], pp_rank: int) -> Part:
    stages, tp, num_stages = stages_of_rank(plan, pp_rank, len(ranges)), plan.mesh.tp, len(ranges)
    layers = sum(len(ranges[stage]) for stage in stages)
    is_first, is_last = 0 in stages, num_stages - 1 in stages
    # A tied head is the embedding; the last of several stages has a copy of its own.
    matrices = is_first + is_last if num_stages > 1 or not spec.tied else 1
    root = matrices * spec.vocab * spec.hidden // tp + spec.hidden * is_last
    experts = expert_parameters(spec)
    router = spec.hidden * spec.block.experts.num_experts if spec.block.experts else 0
    split = spec.attention_parameters + spec.feed_forward_parameters - experts - router
    return Part(
        layers=layers,
        dense=layers * (split // tp + router + 2 * spec.hidden) + root,
        experts=layers * experts // (tp * plan.mesh.ep),
        root=root,
        has_head=is_last,
        flying=in_flight(plan, pp_rank),
    )


def expert_parameters(spec: ModelSpec) -> int:
    """Return the parameters of one layer's routed experts, all of them; 0 in a dense model."""
    experts = spec.block.experts
    return 3 * spec.hidden * experts.ffn * experts.num_experts if experts else 0


def in_flight(plan: Plan, pp_rank: int) -> float:
    """Return for how many micro-batches a rank keeps the activations of all its layers when it keeps the most.

    GPipe keeps all of them. 1F1B keeps as many as there are stages from here on. With several stages a rank the stages
    count one by one: as many as are started before the first comes back.
    """
    ranks, count = plan.mesh.pp, plan.grad_accum
    if ranks == 1:
        return 1
    rounds = plan.num_stages // ranks
    match plan.pipeline.schedule:
        case "gpipe":
            return count
        case "1f1b":
            return min(ranks - pp_rank, count)
        case "interleaved":
            in_a_round = count // max(1, count // ranks)
            started = (rounds - 1) * in_a_round + 2 * (ranks - 1 - pp_rank) + 1
            return min(started, rounds * count) / rounds
        case "zero-bubble":
            return min(ranks, count)
