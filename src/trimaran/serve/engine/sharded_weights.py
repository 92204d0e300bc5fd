"""Builds a rank's part of a network to serve, and reads its slices of weights and adapters: never the whole model."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimaran.checkpoint import DiskSource, fill_shards
from trimaran.checkpoint.convert.convert import MODEL_PREFIX
from trimaran.checkpoint.verify_checkpoint import refuse_damaged_weights
from trimaran.core import AdapterSection, Mesh, ModelSection, Plan, UserError
from trimaran.models import language_of, spec_of, stage_ranges, vision_of, weight_files
from trimaran.models.spec import every_rank_has_rows
from trimaran.nets import (
    AdapterBank,
    LoraLinear,
    Network,
    add_adapter,
    load_peft_adapter,
    local_part,
    local_slices,
    network_of,
    open_network,
    output_head,
)
from trimaran.nets.adapters.adapter_bank import refuse_shared_parts
from trimaran.nets.adapters.attach import AdapterLayout, adapter_layout
from trimaran.nets.decoder.moe import ExpertWeights
from trimaran.nets.local_shards import is_sharded_by_inputs
from trimaran.parallel import TORCH_DTYPES, RankMesh, TensorShard, apply_ep
from trimaran.parallel.axes.sharded_layers import ShardedLinear
from trimaran.parallel.axes.tp import shard_adapter, shard_modules, take_adapter
from trimaran.serve.serving_layers import (
    GROUP,
    OUTPUTS,
    Quantisation,
    is_supported,
    nothing_to_quantise,
    quantise_linear,
)
from trimaran.serve.trained_model import compute_in_bf16, described_adapter

log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedModel:
    """What to serve: weights, how each rank holds them, and the pages of the cache."""

    section: ModelSection  # the run's or the folder's
    folder: Path  # a Hugging Face folder, or with a `step` the checkpoint of a run
    step: int | None = None
    dtype: torch.dtype  # fp32 or bf16, as `compute_in_bf16` has them
    quantise: Quantisation | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)  # PEFT folders by name, which stay unmerged
    check_adapters: Callable[[], None] = lambda: None  # rank 0 calls it; raises UserError for another base
    page_size: int
    # A function of the loaded part and its device may measure free memory: every rank calls it, so that it may
    # compute a step, and the smallest answer counts.
    num_pages: int | Callable[[Network, torch.device], int]

    @property
    def described(self) -> ModelSection:
        """The section that the network is built by. A Hugging Face folder describes itself."""
        section = self.section
        if self.step is not None:
            return section
        return ModelSection(family=section.family, path=str(self.folder), trust_remote_code=section.trust_remote_code)


@dataclass(frozen=True, slots=True, eq=False)
class DescribedAdapter:
    """An adapter of a PEFT folder, and what it changes in the whole network."""

    name: str
    folder: Path
    section: AdapterSection
    layout: AdapterLayout
    whole: Network | None  # of a pipeline stage


def _describe_adapters(whole: Network, model: ServedModel, ranks: RankMesh) -> list[DescribedAdapter]:
    """Return what the adapters change in a whole network, before it is sharded. Raises UserError if one cannot."""
    if model.adapters and dist.get_rank() == 0:
        model.check_adapters()
    found = []
    for name, folder in model.adapters.items():
        section = described_adapter(whole, folder)
        layout = adapter_layout(whole, section)
        language, head = [*whole.towers.values()][-1], output_head(whole)
        outside = [path for path in sorted(layout.targets)
                   if not path.startswith(language) and whole.module.get_submodule(path) is not head]  # fmt: skip
        refuse_shared_parts(name, sorted(layout.trained), outside)
        found.append(DescribedAdapter(name, folder, section, layout, whole if ranks.degrees.pp > 1 else None))
    return found


def _attach_and_fill(network: Network, adapter: DescribedAdapter) -> None:
    for path, layer in list(network.module.named_modules()):
        if path in adapter.layout.targets and isinstance(layer, nn.Linear):  # else it is in another stage
            kind = type(layer)
            add_adapter(layer, adapter.section)
            assert isinstance(layer, LoraLinear)
            layer.base_class = kind
            if isinstance(layer.weight, DTensor):
                shard_adapter(layer, layer.weight.device_mesh, take_adapter(layer))
    load_peft_adapter(network, adapter.folder, adapter.section, adapter.whole)
    network.module.requires_grad_(False)


def refuse_inexact_slices(network: Network, kind: Quantisation) -> None:
    """Raise UserError if a slice cannot be quantised: left as it is, ranks would answer otherwise than one process."""
    for name, layer in _layers(network):
        outputs, inputs = local_part(layer.weight).shape
        if inputs % GROUP or outputs % OUTPUTS:
            raise UserError(
                "U020.rank-slice-inputs",
                where="--tp, --quantise",
                name=name,
                inputs=inputs,
                outputs=outputs,
                kind=kind,
                group=GROUP,
                multiple=OUTPUTS,
            )


@torch.no_grad()
def quantise_part(network: Network, kind: Quantisation, ranks: RankMesh) -> None:
    """Quantise this rank's slices in place, while its weights are still DTensors. Every rank must call it.

    int4 groups of inputs lie inside a slice. A scale of fp8 and int8 is that of a whole row: if ranks have parts of
    it, they agree on its largest value.
    """
    layers = list(_layers(network))
    count = torch.tensor([len(layers)])
    dist.all_reduce(count)
    if not int(count):
        raise nothing_to_quantise(kind)
    for _, layer in layers:
        maxima: Tensor | None = None
        if kind != "int4" and is_sharded_by_inputs(layer):
            maxima = local_part(layer.weight).float().abs().amax(dim=1)
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=ranks.group("tp"))
        quantise_linear(layer, kind, maxima)
    if ranks.device_traits.has_own_memory:
        torch.cuda.empty_cache()  # the cache of keys and values may have the memory of the old weights
    log.info("%d linear layers of this rank have %s weights", len(layers), kind)


def _layers(network: Network) -> Iterator[tuple[str, nn.Linear]]:
    blocks = {part for block in network.blocks for part in block.modules()}
    for name, part in network.module.named_modules():
        if part in blocks and type(part) in (nn.Linear, ShardedLinear):
            assert isinstance(part, nn.Linear)
            if is_supported(part):
                yield name, part


def open_part(model: ServedModel, ranks: RankMesh) -> tuple[Network, AdapterBank | None]:
    """Return this rank's part of the network, with its weights, ready to compute, and the adapters for its sequences.

    Every rank must call it. Raises UserError on every rank if one of them cannot load its part.
    """
    refuse_unservable(model.described, ranks.degrees)
    load = _open_hf if model.section.kind.is_hf else _open_own
    network, described = agreed(lambda: load(model, ranks))
    if reason := network.paged_difference(ranks.device):
        raise _not_split(f"{type(network.module).__name__} cannot attend to pages: it {reason}")
    network.module.eval().requires_grad_(False)
    bank = None
    if model.adapters:  # their weights are still DTensors
        bank = AdapterBank(network, output_head(network))
        for each in described:
            agreed(lambda adapter=each: _attach_and_fill(network, adapter))
            bank.take(each.name)
        network.module.requires_grad_(False)
    if (kind := model.quantise) is not None:
        agreed(lambda: refuse_inexact_slices(network, kind))
        quantise_part(network, kind, ranks)
    # Replace the DTensors of layers that compute with their own slice by that slice: dispatching a DTensor is slow.
    # An embedding, and a head that is tied to it, must know which rows they hold. A layer with a bias that is sharded
    # by its inputs must know that its output is a partial sum.
    tied = {id(part.weight) for part in network.module.modules() if isinstance(part, nn.Embedding)}
    for part in list(network.module.modules()):
        if not isinstance(part, ShardedLinear | ExpertWeights):
            continue
        if isinstance(part, ShardedLinear) and part.bias is not None and is_sharded_by_inputs(part):
            continue
        for name, parameter in list(part.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor) and id(parameter) not in tied:
                part.register_parameter(name, nn.Parameter(local_part(parameter), requires_grad=False))
    return network, bank


def agreed(act: Callable[[], Result]) -> Result:
    """Return the result of `act`, which must not communicate. If it raises UserError on one rank, all ranks raise."""
    result, error = None, None
    try:
        result = act()
    except UserError as raised:
        error = raised
    failed = torch.tensor([dist.get_rank() if error else -1])
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if error is not None:
        raise error
    if (rank := int(failed)) >= 0:
        raise UserError("S053.rank-could", where=f"rank {rank}", rank=rank)
    return cast(Result, result)


def check_weights(weights: ServedModel) -> None:
    """Raise UserError if there are no weights to load, or if a checkpoint is damaged: each rank verifies a share."""
    if weights.step is not None:
        refuse_damaged_weights(weights.folder, share=slice(dist.get_rank(), None, dist.get_world_size()))
    elif not weight_files(weights.folder):
        raise UserError("M020.folder-holds-no-weights", where=str(weights.folder))


def refuse_unservable(section: ModelSection, mesh: Mesh) -> None:
    if section.adapter is not None:
        raise UserError("S052.adapter-served-rank", where="model.adapter")
    if section.kind.is_hf:
        if mesh.pp > 1:
            raise _not_split("pipeline stages are for our own networks, and this model is one of transformers")
        return
    spec = spec_of(section)
    if (language := language_of(spec)) is None:
        raise _not_split("this network generates no text")
    if mesh.pp > 1 and vision_of(spec) is not None:
        raise _not_split("pipeline stages are for language models, and this one also sees images")
    for name, size in language.tensor_sizes().items():
        if size % mesh.tp:
            raise UserError(
                "S050.tp-not-divide", where="--tp", tp=mesh.tp, size=size, name=name, language=language.name
            )
    if not every_rank_has_rows(language.vocab, mesh.tp):
        raise UserError("S050.tp-leaves-ranks", where="--tp", tp=mesh.tp, vocab=language.vocab, language=language.name)
    if mesh.pp > language.layers:
        raise UserError("S050.pp-more-layers", where="--pp", pp=mesh.pp, layers=language.layers, language=language.name)


def _not_split(what: str) -> UserError:
    return UserError("S051.model-cannot-served", where="--tp, --pp", text=what)


def _open_own(weights: ServedModel, ranks: RankMesh) -> tuple[Network, list[DescribedAdapter]]:
    """Return a stage of our own network, or a slice of it, with its weights; and what its adapters change."""
    spec = spec_of(weights.described.model_copy(update={"multi_token_prediction": None}))  # only training needs it
    if spec is None:
        raise _not_split(f"only its plug-in knows the family {weights.described.family}")
    check_weights(weights)
    plan = Plan(mesh=ranks.degrees, grad_accum=ranks.degrees.pp)
    layers = stage_ranges(spec, plan, seq_len=1)[ranks.rank("pp")] if ranks.degrees.pp > 1 else None
    with torch.device("meta"):
        network = network_of(spec, layers)
        whole = network if layers is None or not weights.adapters else network_of(spec)
    described = _describe_adapters(whole, weights, ranks)
    _shard(network, ranks, weights.dtype)
    network.module.to_empty(device=ranks.device)
    if weights.step is None:
        network.load(weights.folder)
    else:
        _load_checkpoint(network.module, weights.folder)
    return network, described


def _open_hf(weights: ServedModel, ranks: RankMesh) -> tuple[Network, list[DescribedAdapter]]:
    """Return a slice of a Hugging Face model, with its weights; and what its adapters change."""
    check_weights(weights)
    network, fill = open_network(weights.described)
    described = _describe_adapters(network, weights, ranks)
    _shard(network, ranks, weights.dtype)
    if weights.step is None:
        fill(ranks.device)
    else:
        from trimaran.nets.hf.hf_build import materialise  # noqa: PLC0415  transformers takes seconds to import

        materialise(network.module, ranks.device)
        _load_checkpoint(network.module, weights.folder)
    return network, described


def _shard(network: Network, ranks: RankMesh, dtype: torch.dtype) -> None:
    """Give the weights their dtype, and shard them, on the meta device: no rank ever holds more than its slices."""
    if dtype == torch.bfloat16:
        compute_in_bf16(network.module)
    if ranks.degrees.tp > 1:
        shard_modules(network.module, ranks.axes["tp"], network.serving_plan(ranks.degrees.tp))
        apply_ep(network, Plan(mesh=ranks.degrees, grad_accum=ranks.degrees.pp), ranks)


@torch.no_grad()
def _load_checkpoint(module: nn.Module, folder: Path) -> None:
    """Fill the module with this rank's slices of a run's checkpoint, read in the dtype of the checkpoint."""
    source, parameters = DiskSource(folder), dict(module.named_parameters())
    for name, target in (parameters | dict(module.named_buffers())).items():
        key = MODEL_PREFIX + name
        if key not in source.index and name not in parameters:
            continue
        if key not in source.index:
            raise UserError("K025.checkpoint-not-weight", where=str(folder), name=name)
        here = local_slices(target)
        values = torch.empty(
            [each.stop - each.start for each in here], dtype=TORCH_DTYPES[source.index[key].meta.dtype]
        )
        shard = TensorShard(key=key, tensor=values, shape=tuple(target.shape), start=tuple(each.start for each in here))
        fill_shards([shard], source)
        local_part(target).copy_(values)
