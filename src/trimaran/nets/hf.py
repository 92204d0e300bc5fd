"""Any local language model that transformers knows. An extra, so only the hf family imports this."""

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.models import Spec, model_folder, weight_files
from trimaran.models.from_hf_vlm import FOREIGN
from trimaran.nets.attention_context import Context, document_positions
from trimaran.nets.hf_attention import SIGHT, context_of, give_attention, give_context, has_windows, is_sighted
from trimaran.nets.hf_probe import probe
from trimaran.nets.hf_residual_dtype import cast_stream
from trimaran.nets.hf_tp_plan import hf_tensor_plan
from trimaran.nets.hf_weights import whole
from trimaran.nets.network import Network
from trimaran.nets.varlen_attention import run_lengths

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar
except ImportError:
    AutoConfig = AutoModelForCausalLM = AutoModelForImageTextToText = disable_progress_bar = None
try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:  # transformers before 5 keeps weights in memory as they are on disk
    revert_weight_conversion = None

LOOK = "warn_if_padding_and_no_attention_mask"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HfNetwork(Network):
    """A Hugging Face causal language model. It has no balance loss: transformers sums its own over the whole batch.

    `architecture` is the class that the model was loaded as; a plan changes the class that Python sees. `ending` is the
    module whose output the logits are, as it returned it; None where the model does something with it afterwards.
    """

    architecture: str
    ending: nn.Module | None

    @property
    def head(self) -> nn.Module | None:
        return self.ending

    @property
    def vocabulary(self) -> int:
        return self.module.get_input_embeddings().num_embeddings  # pyrefly: ignore[not-callable]

    @property
    def longest(self) -> int:
        """How many positions a sequence may have; architectures that name no limit have none."""
        return getattr(self.module.config, "max_position_embeddings", None) or sys.maxsize

    @property
    def context(self) -> Context:
        return context_of(self.module) or Context()

    def use_context(self, context: Context) -> None:
        give_context(self.module, context)

    def tensor_plan(self, degree: int) -> Mapping[str, str]:
        return hf_tensor_plan(self.module, degree)

    def forward(self, inputs: Mapping[str, Tensor], *stream: Tensor) -> tuple[Tensor, Tensor]:
        tokens = inputs["tokens"]
        where = self._where(inputs)
        logits = self.module(input_ids=self.context.mine(tokens), use_cache=False, **where).logits
        return logits, torch.zeros((), device=logits.device)

    @property
    def fringe(self) -> tuple[nn.Module, ...]:
        """The norms around the blocks, where they are not torch's own, which are one kernel anyway."""
        inside = {part for block in self.blocks for part in block.modules()}
        around = (part for part in self.module.modules() if part not in inside and "Norm" in type(part).__name__)
        return tuple(part for part in around if not type(part).__module__.startswith("torch."))

    def _where(self, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what tells the model where each token stands, and which others it may see."""
        tokens, documents, given = inputs["tokens"], inputs.get("documents"), context_of(self.module)
        if documents is None:
            if given is None:
                return {}
            return {"position_ids": given.mine(torch.arange(tokens.shape[1], device=tokens.device)[None])}
        where: dict[str, Any] = {"position_ids": self.context.mine(document_positions(documents))}
        if is_sighted(self.module):
            host = inputs.get("host_documents")
            where[SIGHT] = self.context.sight(documents, None if host is None else run_lengths(host))
        # Positions that start anew tell transformers the documents as well, and it knows the windows of each layer.
        # Where there are none we say it ourselves: it would wait for the device to see whether there are any.
        elif not has_windows(self.module.config):
            where["attention_mask"] = self.context.mask(documents)
        return where

    def disk_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights a block at a time: transformers may fuse those of one block in memory."""
        module: Any = self.module
        owners = {id(each): number for number, block in enumerate(self.blocks) for each in block.parameters()}
        tied = dict(module.named_parameters(remove_duplicate=False)).keys()
        kept = {name: each for name, each in module.state_dict().items() if name not in tied}  # buffers
        parts: dict[int, dict[str, Tensor]] = {}
        for name, tensor in [*module.named_parameters(), *kept.items()]:
            parts.setdefault(owners.get(id(tensor), -1), {})[name] = tensor
        for part in parts.values():
            tensors = {name: whole(tensor) for name, tensor in part.items()}
            if revert_weight_conversion is not None:
                tensors = revert_weight_conversion(module, tensors)
            yield from ((name, tensor.clone().contiguous()) for name, tensor in tensors.items())

    def disk_config(self) -> dict[str, Any]:
        config: Any = self.module.config
        return config.to_dict() | {"architectures": [self.architecture]}


def hf_network(module: nn.Module, spec: Spec | None) -> HfNetwork:
    """Return a Hugging Face model with the blocks that its authors say must not be split, made ready to be fast.

    It gets our attention where its own is the plain one; the log tells where it is not. Nothing may be split yet.
    """
    _stop_looking_for_padding(module)
    found, architecture = probe(module), type(module).__name__
    if found.unlike:
        log.info("%s keeps its own attention: it %s", architecture, found.unlike)
    else:
        give_attention(module)
    cast_stream(module)
    head = module.get_output_embeddings() if found.ends_in_head else None  # pyrefly: ignore[not-callable]
    return HfNetwork(module, blocks_of(module), spec, architecture, head)


def _stop_looking_for_padding(module: nn.Module) -> None:
    """Take out the look at values with which GPT-2 begins: it waits for the device, only to warn of a missing mask."""
    for part in module.modules():
        if hasattr(part, LOOK):
            setattr(part, LOOK, _nothing)


def _nothing(*_: Any) -> None:
    """Return nothing, whatever is asked."""


def blocks_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the parts that the model's authors say must not be split."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return tuple(part for part in module.modules() if type(part).__name__ in names)


def hf_config(path: Path, *, trust_remote_code: bool) -> Any:
    """Return what transformers makes of the folder's config.json."""
    if AutoConfig is None or AutoModelForCausalLM is None or disable_progress_bar is None:
        raise UserError("M023", "Hugging Face models need the transformers package", where="model.family",
                        fix="pip install 'trimaran[hf]'")  # fmt: skip
    disable_progress_bar()  # a rank has a log, not a screen
    folder = model_folder(str(path))
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _not_loaded(error, path) from error


def hf_model(config: Any, *, trust_remote_code: bool) -> Any:
    """Return the model of a config with fp32 weights, random where they have memory."""
    model = _loader(config).from_config(config, trust_remote_code=trust_remote_code, **_settings(config))
    model.config.use_cache = False
    return model


def _loader(config: Any) -> Any:
    """Return the class of transformers that makes a model of the config."""
    return AutoModelForImageTextToText if config.model_type in FOREIGN else AutoModelForCausalLM


def _settings(config: Any) -> dict[str, Any]:
    """Return what every model is loaded with: fp32, and attention by SDPA.

    Gemma 2 has none, so its own code is taken. That needs another kind of mask, which transformers makes where layers
    have windows; a model without either is refused by transformers.
    """
    kind = _loader(config)._model_mapping.get(type(config), None)
    has_none = kind is not None and not getattr(kind, "_supports_sdpa", True)
    return {"dtype": torch.float32, "attn_implementation": "eager" if has_none and has_windows(config) else "sdpa"}


def load_hf_model(path: Path, *, trust_remote_code: bool, seed: int) -> nn.Module:
    """Return the model in the folder, whole, with fp32 weights; random ones of `seed` when it holds only a config.

    Nothing is downloaded, no pickle is read, and code that comes with the model runs only if it is trusted.
    """
    config = hf_config(path, trust_remote_code=trust_remote_code)
    folder, missing = model_folder(str(path)), []
    has_weights = bool(weight_files(folder))
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        if has_weights:
            options |= {"config": config, "use_safetensors": True, "output_loading_info": True}
            model, report = _loader(config).from_pretrained(folder, **options, **_settings(config))
            missing = sorted(report["missing_keys"])
        else:
            torch.manual_seed(seed)
            model = hf_model(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever transformers, or the code that comes with the model, could not do
        raise _not_loaded(error, path) from error
    if missing:  # transformers would go on with noise in their place
        raise UserError("M021", f"the weights are not this model's; missing: {', '.join(missing[:3])}", where=str(path),
                        fix="use the config.json that belongs to the weights")  # fmt: skip
    model.config.use_cache = False
    return model


def _not_loaded(error: Exception, path: Path) -> UserError:
    first_line = str(error).strip().split("\n")[0]
    if "trust_remote_code" in str(error):
        return UserError("M025", "this model runs Python that comes with it", where=str(path),
                         fix="read that code, then set model.trust_remote_code=true")  # fmt: skip
    return UserError("M024", f"transformers cannot load this model: {first_line}", where=str(path),
                     fix="check that the folder is complete and that transformers knows its architecture")  # fmt: skip
