"""Any local transformers language model. transformers is an extra, so only the hf family imports this."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.models import FOREIGN, Spec, model_folder, refuse_tp_degree, weight_files
from trimaran.nets.absent_modules import STREAM_ARGUMENT
from trimaran.nets.decoder.attention_context import Context, document_positions
from trimaran.nets.decoder.key_value_cache import CacheExtension, KeyValueCache
from trimaran.nets.hf.hf_attention import (
    MIXING_ATTRIBUTE,
    OPTION_ATTRIBUTE,
    SCOPE_ARGUMENT,
    SCOPE_ATTRIBUTE,
    context_of,
    has_windows,
    longest_packed_row,
    mixes_documents,
    mixing_reason,
    set_context,
    takes_scope,
    transformers,
    uses_eager_attention,
)
from trimaran.nets.hf.hf_kinds import refuse_later_tokens
from trimaran.nets.hf.hf_probe import (
    LAYER_MASKS_ATTRIBUTE,
    HfCache,
    cache_difference,
    choose_document_masks,
    layer_masks,
    paged_difference,
    probe,
)
from trimaran.nets.hf.hf_sharding import hf_tensor_plan
from trimaran.nets.hf.hf_stages import HfStage
from trimaran.nets.local_shards import ReadTensor, full_tensor
from trimaran.nets.network import Network
from trimaran.nets.paged_cache import PagedExtension
from trimaran.nets.varlen_attention import run_lengths
from trimaran.nets.vlm.vlm_names import DiskTensor

try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:  # transformers before 5 keeps weights in memory as they are on disk
    revert_weight_conversion = None

NO_SDPA = "does not support an attention implementation through torch.nn.functional.scaled_dot_product_attention"
SERVED_STYLES = frozenset({"colwise", "rowwise", "embedding", "colwise-logits"})  # of transformers' own plans
PADDING_CHECK = "warn_if_padding_and_no_attention_mask"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HfNetwork(Network):
    """A Hugging Face causal language model. It has no balance loss: transformers computes its own over the whole batch.

    `architecture` is the class that the model was loaded as; a plan changes the Python class. `logits_head` is the
    module whose output is the logits, unchanged; None if the model processes them afterwards. `stage` is that of a
    pipeline; None if this is the whole model. `padding_position` is the position of padding in models of the RoBERTa
    family, which count other tokens from the next one; None if positions count from 0.
    """

    architecture: str
    logits_head: nn.Module | None
    stage: HfStage | None = field(default=None, kw_only=True)
    padding_position: int | None = field(default=None, kw_only=True)

    @property
    def may_leave_out_parameters(self) -> bool:
        return True  # its code is not ours

    @property
    def head(self) -> nn.Module | None:
        return self.logits_head

    @property
    def vocabulary(self) -> int:
        if self.stage is not None:
            return self.stage.vocabulary
        return self.module.get_input_embeddings().num_embeddings  # pyrefly: ignore[not-callable]

    @property
    def max_seq_len(self) -> int:
        """The longest sequence; unlimited for architectures that give no limit."""
        most = getattr(self.module.config, "max_position_embeddings", None) or 0
        if most <= 0:  # XLNet says -1
            return sys.maxsize
        return most if self.padding_position is None else most - self.padding_position - 1

    def refuse_documents(self, seq_len: int) -> None:
        reason = mixing_reason(self.whole_module)
        if reason and seq_len > longest_packed_row(self.whole_module):
            raise mixes_documents(reason, self.architecture)

    @property
    def context(self) -> Context:
        return context_of(self.module) or Context()

    def use_context(self, context: Context) -> None:
        set_context(self.module, context)

    @property
    def is_foreign(self) -> bool:
        return True

    @property
    def whole_module(self) -> nn.Module:
        return self.module if self.stage is None else self.stage.whole

    @property
    def tied_embedding(self) -> nn.Parameter | None:
        if self.stage is None or not self.stage.tied_name:
            return None
        (weight,) = self.module.get_submodule(self.stage.tied_name).parameters()
        return weight

    @property
    def holds_tied_copy(self) -> bool:
        return self.stage is not None and self.stage.is_last and self.tied_embedding is not None

    def stream_shape(self, inputs: Mapping[str, Tensor], *, tp: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Network`. Tensor parallelism does not split the sequence."""
        assert self.stage is not None, "only a stage has a stream"
        tokens = inputs["tokens"]
        shape = (len(tokens), self.context.shard(tokens).shape[1], self.stage.layers.width)
        return shape, shape

    def tensor_plan(self, degree: int) -> Mapping[str, str]:
        plan, sizes = hf_tensor_plan(self.whole_module, degree)
        refuse_tp_degree(degree, sizes)
        return plan

    def serving_plan(self, degree: int) -> Mapping[str, str]:
        styles = self.tensor_plan(degree)
        if any(style.startswith("foreign-") for style in styles.values()):
            raise UserError("M026.packed-projections-stacked", where="plan.mesh.tp", kind=type(self.module).__name__)
        return {name: style for name, style in styles.items() if style in SERVED_STYLES}

    def has_cache(self, device: torch.device) -> bool:
        return takes_scope(self.module) or not cache_difference(self.module, device)

    def new_cache(self) -> KeyValueCache:
        return KeyValueCache() if takes_scope(self.module) else HfCache(self.module)

    def extend(self, cache: KeyValueCache, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens = inputs["tokens"]
        if isinstance(cache, HfCache):
            return self.module(input_ids=tokens, **cache.arguments(tokens)).logits[:, -1:]
        return self._extended(inputs, cache.extend(tokens), 1 if len(tokens) == 1 else None)

    def paged_difference(self, device: torch.device) -> str:
        return paged_difference(self, device)

    def extend_pages(self, extension: PagedExtension, inputs: Mapping[str, Tensor], *stream: Tensor) -> Tensor:
        return self._extended(inputs, extension, extension.kept)

    def _extended(
        self, inputs: Mapping[str, Tensor], extension: CacheExtension | PagedExtension, kept: Tensor | int | None
    ) -> Tensor:
        """Return the logits that an extension keeps; the model computes no others if it can leave them out."""
        positions = inputs.get("positions", extension.positions)
        positions = positions if self.padding_position is None else positions + self.padding_position + 1
        arguments: dict[str, Any] = {"position_ids": positions, SCOPE_ARGUMENT: extension, "use_cache": False}
        if kept is not None and "logits_to_keep" in signature(self.module.forward).parameters:
            return self.module(input_ids=inputs["tokens"], logits_to_keep=kept, **arguments).logits
        return extension.last_of(self.module(input_ids=inputs["tokens"], **arguments).logits)

    def forward(self, inputs: Mapping[str, Tensor], *stream: Tensor) -> tuple[Tensor, Tensor]:
        tokens = inputs["tokens"]
        arguments = self._attention_arguments(inputs)
        if stream:
            arguments[STREAM_ARGUMENT] = stream[0]
        out = self.module(input_ids=self.context.shard(tokens), use_cache=False, **arguments)
        result = out if isinstance(out, Tensor) else out.logits
        return result, torch.zeros((), device=result.device)

    @property
    def compiled_outside_blocks(self) -> tuple[nn.Module, ...]:
        """The norms outside the blocks, except torch's own, which are one kernel anyway."""
        inside = {part for block in self.blocks for part in block.modules()}
        around = (part for part in self.module.modules() if part not in inside and "Norm" in type(part).__name__)
        return tuple(part for part in around if not type(part).__module__.startswith("torch."))

    def _attention_arguments(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments that give the model positions and the attention scope."""
        tokens, documents, given = inputs["tokens"], inputs.get("documents"), context_of(self.module)
        reason = mixing_reason(self.module)
        if documents is not None and reason and tokens.shape[1] > longest_packed_row(self.module):
            # Refused if the model would learn from a later document; padding may follow the first.
            later = documents > 0
            if (labels := inputs.get("labels")) is not None:
                later = later & (labels >= 0)
            if bool(later.any()):
                raise mixes_documents(reason, self.architecture)
            documents = None
        if documents is None:
            if given is None:
                return {}
            return {"position_ids": given.shard(self._positions(tokens, None))}
        arguments: dict[str, Any] = {"position_ids": self.context.shard(self._positions(tokens, documents))}
        if takes_scope(self.module):
            host_documents = inputs.get("host_documents")
            lengths = None if host_documents is None else run_lengths(host_documents)
            arguments[SCOPE_ARGUMENT] = self.context.scope(documents, lengths)
        elif getattr(self.module, LAYER_MASKS_ATTRIBUTE, False):
            arguments["attention_mask"] = layer_masks(self.module, arguments["position_ids"])
        # transformers derives documents from positions that restart, and knows the windows of each layer.
        # Without documents we pass a mask ourselves: transformers would synchronise with the device to look for them.
        elif not has_windows(self.module.config):
            mask = self.context.mask(documents)
            if uses_eager_attention(self.module):  # it adds the mask to the scores
                lowest = torch.finfo(torch.float32).min
                mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, lowest)
            arguments["attention_mask"] = mask
        return arguments

    def _positions(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        """Return the position of each token inside its document, as the model counts them."""
        indices = torch.arange(tokens.shape[1], device=tokens.device)[None]
        positions = indices if documents is None else document_positions(documents)
        if self.padding_position is None:
            return positions
        is_counted = tokens.ne(self.padding_position)
        ends = is_counted.cumsum(dim=1)
        starts = (ends - is_counted.long()).gather(1, (indices - positions).expand_as(tokens))
        return (ends - starts) * is_counted + self.padding_position

    def disk_tensors(self, read: ReadTensor = full_tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights a block at a time: transformers may fuse those of one block in memory."""
        module: Any = self.module
        owners = {id(each): number for number, block in enumerate(self.blocks) for each in block.parameters()}
        tied = dict(module.named_parameters(remove_duplicate=False)).keys()
        buffers = {name: each for name, each in module.state_dict().items() if name not in tied}
        by_block: dict[int, dict[str, Tensor]] = {}
        for name, tensor in [*module.named_parameters(), *buffers.items()]:
            if self.holds_tied_copy and tensor is self.tied_embedding:
                continue  # the first stage has it, too
            by_block.setdefault(owners.get(id(tensor), -1), {})[name] = tensor
        for block in by_block.values():
            tensors = {name: read(tensor) for name, tensor in block.items()}
            if revert_weight_conversion is not None:
                tensors = revert_weight_conversion(module, tensors)
            yield from ((name, tensor.clone().contiguous()) for name, tensor in tensors.items())

    def disk_config(self) -> dict[str, Any]:
        config: Any = self.module.config
        return config.to_dict() | {"architectures": [self.architecture]}

    def hf_parameter(self, name: str) -> DiskTensor:
        return DiskTensor(name)


def hf_network(module: nn.Module, spec: Spec | None) -> HfNetwork:
    """Return the network of an unsharded Hugging Face model, with our attention if its own is plainly causal."""
    for part in module.modules():
        if hasattr(part, PADDING_CHECK):  # of GPT-2: it synchronises with the device only to warn of a missing mask
            setattr(part, PADDING_CHECK, lambda *_: None)
    config: Any = module.config
    if getattr(config.get_text_config(), "output_router_logits", False):  # its balance loss does not take our masks
        module.register_forward_pre_hook(
            lambda _, args, given: (args, given | {"output_router_logits": False}), with_kwargs=True
        )
    result, architecture = probe(module), type(module).__name__
    refuse_later_tokens(module, architecture, is_noncausal=result.is_noncausal)
    setattr(module, OPTION_ATTRIBUTE, result.unsupported_option)
    if result.attention_difference:
        log.info("%s keeps its own attention: it %s", architecture, result.attention_difference)
    else:
        # A model that passes the scope argument through: no mask is built then, not even for documents.
        set_context(module, Context())
        setattr(module, SCOPE_ATTRIBUTE, True)
    if has_windows(module.config) and not mixing_reason(module) and not choose_document_masks(module):
        setattr(module, MIXING_ATTRIBUTE, "builds attention masks that ignore documents")
    names = ("num_attention_heads", "n_head", "n_heads")  # state-space models and RWKV have no attention scores
    if uses_eager_attention(module) and any(getattr(config.get_text_config(), each, None) for each in names):
        log.warning("%s has no SDPA attention in transformers and trains with its eager attention: slower, and each "
                    "layer keeps scores of heads x seq_len^2 values for every sample", architecture)  # fmt: skip
    # Cast the residual stream to the autocast dtype, from the embedding on; rotary tables stay fp32. Autocast alone
    # leaves the stream in fp32, the dtype of the embedding's weights: every addition, norm and copy between two matmuls
    # would move twice the bytes, and pipeline stages, which send it in the autocast dtype, would compute something else
    # than one process.
    tokens = module.get_input_embeddings()  # pyrefly: ignore[not-callable]
    owner = next(part for part in module.modules() if any(child is tokens for child in part.children()))
    for name, part in owner.named_children():  # also what is added to the embedding of tokens, or normalises it
        is_rotary = "Rotary" in type(part).__name__ or "rotary" in name
        if part is tokens or (not is_rotary and (isinstance(part, nn.Embedding) or "embed" in name)):
            part.register_forward_hook(_to_autocast_dtype)
    for part in module.modules():
        if type(part).__name__.endswith("RotaryEmbedding"):
            part.register_forward_pre_hook(_with_fp32_input)
    head = module.get_output_embeddings() if result.ends_in_head else None  # pyrefly: ignore[not-callable]
    # A model of the RoBERTa family has a row for padding in its table of positions, with the number of that token.
    tables = (getattr(part, "position_embeddings", None) for part in module.modules())
    found = (each.padding_idx for each in tables if isinstance(each, nn.Embedding))
    padding = next((each for each in found if each is not None), None)
    return HfNetwork(module, blocks_of(module), spec, architecture, head, padding_position=padding)


def _to_autocast_dtype(embedding: nn.Module, _: Any, out: Any) -> Any:
    if not isinstance(out, Tensor) or not out.is_floating_point():
        return out
    device = out.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # torch refuses to say it for the meta device
        return out
    return out.to(torch.get_autocast_dtype(device))


def _with_fp32_input(rotary: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return an fp32 stand-in for the stream: a bf16 table would rotate late positions by wrong angles."""
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return None
    stand_in = torch.empty((), dtype=torch.float32, device=args[0].device).expand(args[0].shape)
    return stand_in, *args[1:]


def blocks_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the modules that the model's `_no_split_modules` names."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return tuple(part for part in module.modules() if type(part).__name__ in names)


def hf_config(path: Path, *, trust_remote_code: bool) -> Any:
    if transformers is None:
        raise UserError("M023.hugging-face-models", where="model.family")
    transformers.utils.logging.disable_progress_bar()  # a rank writes to a log
    folder = model_folder(str(path))
    try:
        return transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise _not_loaded(error, path) from error


def hf_model(config: Any, *, trust_remote_code: bool) -> Any:
    """Return the model of a config with fp32 weights, random unless on the meta device."""
    options = {"trust_remote_code": trust_remote_code}
    model = _with_attention(lambda settings: auto_class(config).from_config(config, **options, **settings))
    model.config.use_cache = False
    return model


def auto_class(config: Any) -> Any:
    foreign = config.model_type in FOREIGN
    return transformers.AutoModelForImageTextToText if foreign else transformers.AutoModelForCausalLM


def _with_attention(build: Callable[[dict[str, Any]], Any]) -> Any:
    """Return what `build` makes, in fp32, with SDPA or else eager attention. Only trying shows if a class has SDPA."""
    try:
        return build({"dtype": torch.float32, "attn_implementation": "sdpa"})
    except ValueError as error:
        if NO_SDPA not in str(error):
            raise
    return build({"dtype": torch.float32, "attn_implementation": "eager"})


def load_hf_model(path: Path, *, trust_remote_code: bool, seed: int) -> nn.Module:
    """Return the local model in fp32, random from `seed` without weights. Its own code runs only if it is trusted."""
    config = hf_config(path, trust_remote_code=trust_remote_code)
    folder, missing = model_folder(str(path)), []
    has_weights = bool(weight_files(folder))
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        if has_weights:
            options |= {"config": config, "use_safetensors": True, "output_loading_info": True}
            model, report = _with_attention(
                lambda settings: auto_class(config).from_pretrained(folder, **options, **settings)
            )
            missing = sorted(report["missing_keys"])
        else:
            torch.manual_seed(seed)
            model = hf_model(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # any error of transformers or of the model's own code
        raise _not_loaded(error, path) from error
    if missing:  # transformers would continue with random values in their place
        raise UserError("M021.weights-not-match", where=str(path), missing=", ".join(missing[:3]))
    model.config.use_cache = False
    return model


def _not_loaded(error: Exception, path: Path) -> UserError:
    first_line = str(error).strip().split("\n")[0]
    if "trust_remote_code" in str(error):
        return UserError("M025.model-needs-own", where=str(path))
    return UserError("M024.transformers-cannot-load", where=str(path), first_line=first_line)
