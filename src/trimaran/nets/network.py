"""The interface between the trainer and a network, ours or Hugging Face's, and how the network of a spec is built."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trimaran.core import ModelSection, UserError, did_you_mean
from trimaran.models import ModelSpec, PerceptionSpec, Spec, VlmSpec, decoder_of, language_of, spec_of
from trimaran.nets.decoder.attention_context import Context
from trimaran.nets.decoder.decoder import Decoder
from trimaran.nets.decoder.key_value_cache import KeyValueCache
from trimaran.nets.decoder.moe import MoeLayer
from trimaran.nets.decoder.tp_plan import serving_tensor_plan, tensor_plan
from trimaran.nets.local_shards import ReadTensor, full_tensor, to_empty
from trimaran.nets.paged_cache import PagedExtension
from trimaran.nets.varlen_attention import run_lengths

if TYPE_CHECKING:
    from trimaran.nets.vlm.vlm_names import DiskTensor


def tower_of(name: str, towers: Mapping[str, str]) -> str:
    """Return the tower of a parameter or module: the one with the longest matching prefix, else the last tower.

    `towers` maps each tower to its prefix, like `Network.towers`. Names without a tower belong to the root module;
    they count to the last tower, which computes the loss.
    """
    matching = [tower for tower, prefix in towers.items() if f"{name}.".startswith(prefix)]
    return max(matching, key=lambda tower: len(towers[tower]), default=[*towers][-1])


def refuse_unknown_tower(name: str, towers: Iterable[str], *, code: str, where: str) -> None:
    known = list(towers)
    if name not in known:
        raise UserError(code, f"the network has no tower '{name}'{did_you_mean(name, known)}", where=where,
                        fix=f"its towers are {', '.join(known)}")  # fmt: skip


class WeightsNeededError(Exception):
    """A Hugging Face model cannot be built without its weights; the text says why."""


@dataclass(frozen=True, slots=True)
class Network:
    """A module, and what the trainer needs to know of it. `blocks` are sharded, compiled and recomputed one by one."""

    module: nn.Module
    blocks: tuple[nn.Module, ...]
    spec: Spec | None

    def forward(self, inputs: Mapping[str, Tensor], *stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output for one micro-batch, and the balance loss, an fp32 scalar.

        `inputs` are unsharded sequences under every plan; other entries are ignored. The output is the logits
        [B, T, vocab] of this rank's positions, a DTensor if tensor parallelism shards the vocabulary. A pipeline stage
        other than the last returns its hidden states instead, and the next takes them as `stream`.
        """
        lengths = {"lengths": run_lengths(inputs["host_documents"])} if "host_documents" in inputs else {}
        labels = {"labels": inputs["labels"]} if self.predicts_later and "labels" in inputs else {}
        return self.module(*stream, tokens=inputs["tokens"], documents=inputs.get("documents"), **lengths, **labels)

    @property
    def predicts_later(self) -> bool:
        """Whether `forward` also computes the loss of later tokens (multi-token prediction): in training only."""
        language = language_of(self.spec)
        has_layers = language is not None and language.prediction_layers > 0
        return has_layers and self.module.training and torch.is_grad_enabled()

    @property
    def may_leave_out_parameters(self) -> bool:
        """Whether a loss may not depend on some trained parameters, such as those of experts without tokens."""
        return False

    def uncalled_linears(self) -> set[nn.Module]:
        """Return linear layers whose weight the module around them uses in fp32: routers and stems of vision towers."""
        return {each.gate for each in self.module.modules() if isinstance(each, MoeLayer)}

    def has_cache(self, device: torch.device) -> bool:
        """Return whether the network, on `device`, computes the same with a cache as without. Every rank calls it."""
        return True

    def new_cache(self) -> KeyValueCache:
        """Return an empty cache for the keys and values of a batch, for `extend`."""
        return KeyValueCache()

    def extend(self, cache: KeyValueCache, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits [rows, 1, vocab] of the token that follows each row, and append `inputs` to the cache."""
        return self.module(tokens=inputs["tokens"], extension=cache.extend(inputs["tokens"]))[0]

    def paged_difference(self, device: torch.device) -> str:
        """Return why the network, on `device`, cannot attend to pages; empty if it can. Call it before paging."""
        is_long = self.long_after < self.max_seq_len
        return "has rotary frequencies that depend on the longest sequence" if is_long else ""

    def extend_pages(self, extension: PagedExtension, inputs: Mapping[str, Tensor], *stream: Tensor) -> Tensor:
        """Return the logits [1, K, vocab] of the tokens that `extension` keeps, and write all of them to their pages.

        `inputs` has the `tokens` [1, N] of all sequences, the patches and grids of those that have new images, in
        order, and grid `positions` [3, 1, N]. A pipeline stage takes and returns a stream, as in `forward`.
        """
        return self.module(*stream, tokens=inputs["tokens"], extension=extension)[0]

    @property
    def towers(self) -> Mapping[str, str]:
        """The parts that can be trained differently: the prefix of the parameter names, by the name of each tower."""
        return {"language": ""}

    def stream_shape(self, inputs: Mapping[str, Tensor], *, tp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the input and output streams of this pipeline stage, for one micro-batch."""
        assert self.spec is not None, "only our own networks are split into stages"
        tokens = inputs["tokens"]
        shape = (len(tokens), self.context.shard(tokens).shape[1] // tp, self.spec.hidden)
        return shape, shape

    @property
    def is_foreign(self) -> bool:
        return False

    @property
    def whole_module(self) -> nn.Module:
        """The module, or that of which it is a pipeline stage, if that is known."""
        return self.module

    @property
    def tied_embedding(self) -> nn.Parameter | None:
        """This stage's copy of an embedding that the head or later-token prediction of another stage shares."""
        decoder = self._stage_decoder
        if decoder is None or not decoder.spec.shares_embedding or decoder.is_first == decoder.is_last:
            return None
        return None if decoder.embed_tokens is None else next(decoder.embed_tokens.parameters())

    @property
    def holds_tied_copy(self) -> bool:
        """Whether this is the last stage, which has a copy of a tied embedding of the first one."""
        decoder = self._stage_decoder
        return decoder is not None and decoder.is_last and self.tied_embedding is not None

    @property
    def _stage_decoder(self) -> Decoder | None:
        """The decoder, which may be a tower of a larger model; None if this stage has no part of it."""
        return next((each for each in self.module.modules() if isinstance(each, Decoder)), None)

    @property
    def context(self) -> Context:
        """Says which positions of each sequence this rank holds."""
        return self.module.context  # pyrefly: ignore[bad-return]

    def use_context(self, context: Context) -> None:
        """Hold a part of each sequence from now on."""
        self.module.use_context(context)  # pyrefly: ignore[not-callable]

    def tensor_plan(self, degree: int) -> Mapping[str, str]:
        """Return the tensor-parallel plan for that degree: a style of `parallel.axes.tp` by module name pattern."""
        return tensor_plan(self._decoder_spec)

    def serving_plan(self, degree: int) -> Mapping[str, str]:
        """Return the tensor-parallel plan of a serving engine. Raises UserError if the network has none."""
        return serving_tensor_plan(self._decoder_spec)

    @property
    def compiled_outside_blocks(self) -> tuple[nn.Module, ...]:
        """Modules outside the blocks that are also compiled, because they are many small elementwise kernels."""
        return ()

    @property
    def head(self) -> nn.Module | None:
        """The module whose output is the logits, but for what `has_bare_head` says; None if there is none."""
        return self.module.lm_head  # pyrefly: ignore[bad-return]

    @property
    def has_bare_head(self) -> bool:
        """Whether the logits are the output of `head`, unchanged: not scaled, and not capped."""
        language = language_of(self.spec)
        return language is None or language.block.ends.bare_head

    @property
    def vocabulary(self) -> int:
        assert isinstance(self.spec, ModelSpec | VlmSpec), "other networks override these methods"
        return self.spec.vocab

    @property
    def max_seq_len(self) -> int:
        assert isinstance(self.spec, ModelSpec | VlmSpec), "other networks override these methods"
        return self.spec.max_seq_len

    def refuse_documents(self, seq_len: int) -> None:
        """Raise UserError if rows of this length cannot hold documents that do not attend to each other."""

    @property
    def long_after(self) -> int:
        """The length after which all positions, also cached ones, get other frequencies; the largest int if none."""
        language = language_of(self.spec)
        if language is None or language.block.rope.longrope is None:
            return sys.maxsize
        return language.block.rope.original_max_seq_len

    def disk_tensors(self, read: ReadTensor = full_tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight, by `read` unsharded on the CPU, under its Hugging Face name. Every rank takes all."""
        from trimaran.nets.hf_weights import hf_tensors  # noqa: PLC0415  when a model is saved

        return hf_tensors(self.module, self._decoder_spec, read)

    def disk_config(self) -> dict[str, Any]:
        from trimaran.models import spec_to_hf  # noqa: PLC0415  when a model is saved

        return spec_to_hf(self._decoder_spec)

    def hf_parameter(self, name: str) -> "DiskTensor":
        """Return the parameter of transformers' model, once loaded, that holds our parameter `name`."""
        from trimaran.models.from_hf import packed_part  # noqa: PLC0415  few runs start from weights
        from trimaran.nets.vlm.vlm_names import DiskTensor  # noqa: PLC0415

        if name.startswith("lm_head."):
            return DiskTensor(name)
        packed = packed_part(name, self._decoder_spec)
        return DiskTensor(f"model.{name}") if packed is None else DiskTensor(*packed[:3], shares=packed[3])

    def load(self, folder: Path, report_progress: Callable[[], None] = lambda: None) -> None:
        """Fill the module in place from the safetensors in `folder`; each rank reads its own shards."""
        from trimaran.nets.hf_weights import load_hf_weights  # noqa: PLC0415  few runs start from weights

        load_hf_weights(self.module, folder, report_progress)

    def weight_reader(self, files: Mapping[str, Any]) -> Callable[[str], Tensor]:
        """Return a function that reads a parameter, unsharded, by its name from these open files."""
        from trimaran.nets.hf_weights import decoder_reader  # noqa: PLC0415  few runs start from weights

        return decoder_reader(self.module, self._decoder_spec, files)

    @property
    def _decoder_spec(self) -> ModelSpec:
        decoder = decoder_of(self.spec)
        assert decoder is not None, "other networks override these methods"
        return decoder


def output_head(network: Network) -> nn.Module | None:
    """Return the module whose input is the last layer's output; its own output may be processed further."""
    if network.head is not None or not hasattr(network.module, "get_output_embeddings"):
        return network.head
    return network.module.get_output_embeddings()  # pyrefly: ignore[not-callable]


def decoder_network(spec: ModelSpec, layers: range | None = None) -> Network:
    """Return our decoder, or the stage with these layers, on the default device, uninitialised."""
    module = Decoder(spec, layers)
    return Network(module, module.blocks, spec)


def open_network(section: ModelSection, *, seed: int = 0) -> tuple[Network, Callable[[torch.device], None]]:
    """Return the whole network of a section without weights, and a function that gives it memory on a device.

    The weights of a Hugging Face model are then as on disk, or random ones from `seed`; those of others are undefined.
    """
    if section.kind.is_hf:
        from trimaran.nets.hf.hf_build import open_hf_model  # noqa: PLC0415  transformers takes seconds to import
        from trimaran.nets.hf.hf_vlm import network_of_hf  # noqa: PLC0415

        assert section.path is not None, "a section without a path has no spec to plan with"
        module, fill = open_hf_model(Path(section.path), trust_remote_code=section.trust_remote_code, seed=seed)
        return network_of_hf(module, spec_of(section)), partial(fill, module)
    with torch.device("meta"):
        if section.kind.is_plugin:
            from trimaran.nets.plugin_network import plugin_network  # noqa: PLC0415

            network = plugin_network(section)
        else:
            spec = spec_of(section)
            assert spec is not None, "our own networks always have a spec"
            network = network_of(spec)
    return network, partial(to_empty, network.module)


def network_of(spec: Spec, blocks: range | None = None) -> Network:
    """Return the network of this shape, or the stage with these blocks, on the default device, uninitialised."""
    match spec:
        case ModelSpec():
            return decoder_network(spec, blocks)
        case VlmSpec():
            from trimaran.nets.vlm.vlm_network import vlm_network  # noqa: PLC0415

            return vlm_network(spec, blocks)
        case PerceptionSpec():
            from trimaran.nets.perception import perception_network  # noqa: PLC0415

            return perception_network(spec, blocks)
