"""The engines that run a plan, and what the planner, the trainer and messages must know about each."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """What an engine does and supports. The defaults are those of our own trainer, engine `torch`."""

    label: str  # in messages
    package: str = ""  # must be installed for it
    variables_on_cpu: Mapping[str, str] = field(default_factory=dict, hash=False)  # of its ranks on CPUs

    is_synchronous: bool = True  # ranks hold the same weights after every step
    uses_fsdp: bool = True  # DDP or FSDP exchange gradients and weights: hooks, buckets and units are theirs
    shards_weights_itself: bool = False  # takes whole weights from the host, and moves them to buffers of its own
    keeps_states_elsewhere: bool = False  # weights, moments and loss scale are not those of our optimizer on the rank

    splits_models: bool = True  # over the ranks of tp, pp, cp and ep
    has_replicas_of_shards: bool = True  # dp_replicate and dp_shard together
    shards_one_rank: bool = False  # a single rank has shards, too; without shards it offloads nothing
    needs_shards_for_16_bits: bool = False

    compiles: bool = True  # runs compiled blocks
    captures_steps: bool = True  # replays forward and backward as CUDA graphs
    updates_by_kernel: bool = True  # the update on a GPU is our kernel, not torch's AdamW
    needs_logits: bool = False  # calls the loss with logits, so neither fuses it nor predicts later tokens
    trains_adapters: bool = True

    times_collectives: bool = True  # measures the communication of each axis
    can_change_live: bool = True  # changes its plan while it runs
    can_rehearse: bool = True  # runs one rank without the others


ENGINE_TRAITS: dict[str, EngineTraits] = {
    "torch": EngineTraits(label="engine torch"),
    "deepspeed": EngineTraits(
        label="DeepSpeed's engine",
        package="deepspeed",
        variables_on_cpu={"DS_ACCELERATOR": "cpu"},
        uses_fsdp=False,
        shards_weights_itself=True,
        keeps_states_elsewhere=True,
        splits_models=False,
        has_replicas_of_shards=False,
        shards_one_rank=True,
        needs_shards_for_16_bits=True,
        compiles=False,
        captures_steps=False,
        updates_by_kernel=False,
        needs_logits=True,
        trains_adapters=False,
        times_collectives=False,
        can_change_live=False,
        can_rehearse=False,
    ),
    "async": EngineTraits(
        label="engine async",
        is_synchronous=False,
        uses_fsdp=False,
        keeps_states_elsewhere=True,
        splits_models=False,
        captures_steps=False,
        times_collectives=False,
        can_change_live=False,
        can_rehearse=False,
    ),
}
