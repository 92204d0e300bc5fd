"""The `Network` of our vision-language model, and its weights as safetensors, in Hugging Face's format or our own."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.models import Form, VlmSpec, disk_form, form_of_config, read_json, vlm_to_disk
from trimaran.nets.decoder.key_value_cache import KeyValueCache
from trimaran.nets.decoder.tp_plan import serving_tensor_plan, vlm_tensor_plan
from trimaran.nets.hf_weights import open_sources, refuse_problems
from trimaran.nets.local_shards import ReadTensor, full_tensor, is_on_meta, local_part, local_slices
from trimaran.nets.network import Network
from trimaran.nets.nf4_linear import loadable_weights, weight_to_fill
from trimaran.nets.paged_cache import PagedExtension
from trimaran.nets.varlen_attention import run_lengths
from trimaran.nets.vlm.vision import Stem
from trimaran.nets.vlm.vlm_model import Vlm
from trimaran.nets.vlm.vlm_names import DiskTensor, canonical, in_memory, may_be_ignored, on_disk

EMBEDDING, HEAD = "language.embed_tokens.weight", "language.lm_head.weight"
MAX_CONFIG_BYTES = 10_000_000
Sources = Mapping[str, tuple[Any, str]]  # by a tensor's canonical name: its open file, and its name in that file
IMAGE_INPUTS = ("positions", "patches", "grids", "features")


def load_vlm_weights(module: Vlm, folder: Path, report_progress: Callable[[], None] = lambda: None) -> None:
    """Fill a Vlm in place from the safetensors in `folder`, in the parameters' own dtypes.

    Each rank reads only the rows it holds, and a stage only its blocks. Names and shapes are checked before the first
    value is written; on the meta device nothing else is done. An adapter is not filled. `report_progress` is called
    after each tensor.
    """
    form = form_of_config(read_json(folder / "config.json", limit_bytes=MAX_CONFIG_BYTES))
    with open_sources(folder) as files:
        sources = {canonical(name, form): (file, name) for name, file in files.items()}
        parameters = loadable_weights(module)
        _refuse_mismatch(parameters, sources, module.spec, form, folder)
        # A head that is tied by config.json must not have values of its own on disk.
        head, embedding = (sources.get(on_disk(name, module.spec, form).name) for name in (HEAD, EMBEDDING))
        if module.spec.tied and head is not None and embedding is not None:
            first, other = (file.get_slice(name)[:1] for file, name in (head, embedding))
            if not torch.equal(first, other):
                raise UserError("M075.config-json-ties", where=str(folder))
        if is_on_meta(module):
            return
        for name, parameter in parameters.items():
            with weight_to_fill(module, name, parameter) as target:
                _copy(target, on_disk(name, module.spec, form), sources)
            report_progress()


def vlm_tensors(module: Vlm, read: ReadTensor = full_tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a Vlm unsharded, on the CPU, under its name on disk; a tied head is omitted.

    So is the last stage's copy of a tied embedding. Each item is a collective for sharded weights: every rank must take
    every item.
    """
    form, spec = disk_form(module.spec), module.spec
    embeds = module.language is not None and module.language.is_first
    waiting: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if spec.tied and (name == HEAD or (name == EMBEDDING and not embeds)):
            continue
        stored, value = on_disk(name, spec, form), read(parameter)
        parts = waiting.setdefault(stored.name, [])
        parts.append(value)
        if len(parts) == stored.parts:  # the parts of one tensor come in order: queries, keys, values
            tensor = stored.joined(waiting.pop(stored.name))
            yield stored.name, tensor.view(stored.shape) if stored.shape else tensor


def _refuse_mismatch(
    parameters: Mapping[str, Tensor], sources: Sources, spec: VlmSpec, form: Form, folder: Path
) -> None:
    missing, misshapen = [], []
    for name, parameter in parameters.items():
        stored = on_disk(name, spec, form)
        wanted = stored.disk_shape(parameter.shape)
        if stored.name not in sources:
            missing.append(stored.name)
            continue
        file, name_in_file = sources[stored.name]
        found = file.get_slice(name_in_file).get_shape()
        if found != wanted and not _is_not_transposed(found, stored, parameter):
            misshapen.append(f"{stored.name} {found} (the model has {wanted})")
    with torch.device("meta"):
        expected = {on_disk(name, spec, form).name for name, _ in Vlm(spec).named_parameters()}
    unexpected = [each for each in sources if each not in expected and not may_be_ignored(each, form)]
    refuse_problems(missing, misshapen, unexpected, folder)


def _copy(parameter: Tensor, stored: DiskTensor, sources: Sources) -> None:
    local, here = local_part(parameter), local_slices(parameter)
    if not local.numel():
        return
    file, name_in_file = sources[stored.name]
    if stored.shape is not None:  # a small one, read completely
        local.copy_(file.get_tensor(name_in_file).view(parameter.shape)[here])
        return
    on_file, done, dim = file.get_slice(name_in_file), 0, stored.dim
    if _is_not_transposed(on_file.get_shape(), stored, parameter):
        stored = replace(stored, transposed=False)
    for rows in stored.row_slices(parameter.shape[dim], here[dim]):
        count = rows.stop - rows.start
        local.narrow(dim, done, count).copy_(stored.read(on_file, rows, (*here[:dim], *here[dim + 1 :])))
        done += count


def _is_not_transposed(found: list[int], stored: DiskTensor, parameter: Tensor) -> bool:
    """Return whether a tensor with the shape `found` has its last two dimensions as the parameter: some folders do."""
    return found == replace(stored, transposed=False).disk_shape(parameter.shape)


@dataclass(frozen=True, slots=True)
class VlmNetwork(Network):
    """Our vision-language model, or a stage of it."""

    module: Vlm
    spec: VlmSpec

    @property
    def head(self) -> nn.Module | None:
        return None if self.module.language is None else self.module.language.lm_head

    def forward(self, inputs: Mapping[str, Tensor], *stream: Tensor) -> tuple[Tensor, Tensor]:
        host_documents, host_grids = inputs.get("host_documents"), inputs.get("host_grids")
        return self.module(
            *stream,
            tokens=inputs["tokens"],
            documents=inputs.get("documents"),
            lengths=None if host_documents is None else run_lengths(host_documents),
            # DDP and FSDP would move a tensor to the device.
            host_grids=None if host_grids is None else host_grids.numpy(),
            **{name: inputs.get(name) for name in IMAGE_INPUTS},
        )

    def extend(self, cache: KeyValueCache, inputs: Mapping[str, Tensor]) -> Tensor:
        images = {name: inputs[name] for name in IMAGE_INPUTS if name in inputs}
        return self.module(tokens=inputs["tokens"], extension=cache.extend(inputs["tokens"]), **images)[0]

    def extend_pages(self, extension: PagedExtension, inputs: Mapping[str, Tensor], *stream: Tensor) -> Tensor:
        images = {name: inputs[name] for name in IMAGE_INPUTS if name in inputs}
        return self.module(*stream, tokens=inputs["tokens"], extension=extension, **images)[0]

    def uncalled_linears(self) -> set[nn.Module]:
        stems = {each.patch_embed for each in self.module.modules() if isinstance(each, Stem)}
        return Network.uncalled_linears(self) | stems

    @property
    def towers(self) -> Mapping[str, str]:
        return {"vision": "vision.", "projector": "projector.", "language": "language."}

    def stream_shape(self, inputs: Mapping[str, Tensor], *, tp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Network`. Up to the projector it is the padded vision stream. Tensors of deepstack accompany both."""
        tokens, held, projector = inputs["tokens"], self.module.held, self.spec.vision.layers
        vision = (1, self.module.max_vision_length(tokens), self.spec.vision.hidden * self.module.num_projections)
        rows, length = len(tokens), self.context.shard(tokens).shape[1] // tp
        into, out = ((rows, length, self.spec.hidden * (1 + each)) for each in self.module.num_pending)
        return vision if held.start <= projector else into, vision if held.stop <= projector else out

    def tensor_plan(self, degree: int) -> Mapping[str, str]:
        return vlm_tensor_plan(self.spec)

    def serving_plan(self, degree: int) -> Mapping[str, str]:
        return {f"language.{name}": style for name, style in serving_tensor_plan(self.spec.language).items()}

    def disk_tensors(self, read: ReadTensor = full_tensor) -> Iterator[tuple[str, Tensor]]:
        return vlm_tensors(self.module, read)

    def disk_config(self) -> dict[str, Any]:
        return vlm_to_disk(self.spec)

    def hf_parameter(self, name: str) -> DiskTensor:
        return in_memory(name, self.spec, disk_form(self.spec))

    def load(self, folder: Path, report_progress: Callable[[], None] = lambda: None) -> None:
        load_vlm_weights(self.module, folder, report_progress)

    def weight_reader(self, files: Mapping[str, Any]) -> Callable[[str], Tensor]:
        form = disk_form(self.spec)
        sources = {canonical(name, form): (file, name) for name, file in files.items()}

        def read(name: str) -> Tensor:
            stored = on_disk(name, self.spec, form)
            file, name_in_file = sources[stored.name]
            value = file.get_tensor(name_in_file)
            value = stored.taken_from(value) if stored.parts > 1 or stored.transposed else value
            return value.reshape(self.module.get_parameter(name).shape)

        return read


def vlm_network(spec: VlmSpec, blocks: range | None = None) -> VlmNetwork:
    """Return our vision-language model, or the stage with these blocks, on the default device, uninitialised."""
    module = Vlm(spec, blocks)
    return VlmNetwork(module, module.blocks, spec)
