"""The kinds of devices, engines and networks, and what the planner, the trainer and messages must know about each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """What follows from the kind of a device, for one in a catalogue and for a device of torch."""

    backend: str  # of torch.distributed
    group_backends: str  # of a process group that also communicates tensors in host memory

    shares_cores: bool = False  # any number of ranks are on a node, and compute and communicate with the same cores
    has_own_memory: bool = False  # beside the host's: copies are from pinned memory, torch's allocator caches blocks
    has_own_generator: bool = False  # of random numbers
    runs_async: bool = False  # the host launches kernels and goes on; events in a stream time them
    has_graphs: bool = False  # CUDA graphs
    has_kernels: bool = False  # Triton, and kernels for 4-bit, integer and fp8 weights

    has_data_sheet: bool = False  # rates and links are known without a measurement
    prefers_16_bits: bool = False  # computes in 16 bits unless told otherwise
    compiles_by_default: bool = False
    compiles_recomputed_slices: bool = False  # tensor-parallel blocks that are recomputed as a whole


_HOST = DeviceTraits(backend="gloo", group_backends="gloo", shares_cores=True)
# By torch's name of the device type.
DEVICE_TRAITS: dict[str, DeviceTraits] = {
    "cuda": DeviceTraits(
        backend="nccl",
        group_backends="cpu:gloo,cuda:nccl",
        has_own_memory=True,
        has_own_generator=True,
        runs_async=True,
        has_graphs=True,
        has_kernels=True,
        has_data_sheet=True,
        prefers_16_bits=True,
        compiles_by_default=True,
        compiles_recomputed_slices=True,
    ),
    "cpu": _HOST,
    "meta": _HOST,  # a model without weights, which the host looks at
}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A family of networks: who builds it, and what it reads; models of transformers may read images, too."""

    name: str
    built_by: Literal["trimaran", "transformers", "plugin"] = "trimaran"
    reads: Literal["text", "images", "scenes"] = "text"
    splits_sequence: bool = False  # tensor-parallel ranks split the positions, and gather a layer's inputs
    in_transformers: bool = True  # transformers loads an exported folder
    pipeline_tag: str = "text-generation"  # the Hub's name of the task; empty for none

    @property
    def is_hf(self) -> bool:
        """Whether transformers builds the network."""
        return self.built_by == "transformers"

    @property
    def is_plugin(self) -> bool:
        """Whether a plug-in builds the network."""
        return self.built_by == "plugin"

    @property
    def is_language_model(self) -> bool:
        """Whether the network reads text alone, and its code is known: not a plug-in's."""
        return self.reads == "text" and not self.is_plugin


MODEL_FAMILIES = {
    family.name: family
    for family in (
        ModelFamily(name="decoder", splits_sequence=True),
        ModelFamily(name="vlm", reads="images", splits_sequence=True, pipeline_tag="image-text-to-text"),
        ModelFamily(name="perception", reads="scenes", in_transformers=False, pipeline_tag=""),
        ModelFamily(name="hf", built_by="transformers"),
    )
}


def family_named(name: str) -> ModelFamily:
    """Return the family of this name: one of ours, or a plug-in's."""
    return MODEL_FAMILIES.get(name) or ModelFamily(name=name, built_by="plugin", in_transformers=False)
