"""Any local causal language model that transformers knows. An extra, so only the hf family imports this."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.models import Spec, model_folder, weight_files
from trimaran.nets.context import Context, document_positions
from trimaran.nets.hf_attention import context_of, give_context, has_windows
from trimaran.nets.hf_tensor_plan import hf_tensor_plan
from trimaran.nets.hf_weights import whole
from trimaran.nets.network import Network

try:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar
except ImportError:
    AutoConfig = AutoModelForCausalLM = disable_progress_bar = None
try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:  # transformers before 5 keeps weights in memory as they are on disk
    revert_weight_conversion = None

SETTINGS: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}


@dataclass(frozen=True, slots=True)
class HfNetwork(Network):
    """A Hugging Face causal language model. It has no balance loss: transformers sums its own over the whole batch.

    `architecture` is the class that the model was loaded as; a plan changes the class that Python sees.
    """

    architecture: str

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
        tokens, documents = inputs["tokens"], inputs.get("documents")
        given = context_of(self.module)
        where: dict[str, Tensor] = {}
        if documents is not None:
            where = {"position_ids": self.context.mine(document_positions(documents))}
            # Positions that start anew tell transformers the documents as well, and it knows the windows of each layer.
            # Where there are none we say it ourselves: it would wait for the device to see whether there are any.
            if not has_windows(self.module):
                where["attention_mask"] = self.context.mask(documents)
        elif given is not None:
            where = {"position_ids": given.mine(torch.arange(tokens.shape[1], device=tokens.device)[None])}
        logits = self.module(input_ids=self.context.mine(tokens), use_cache=False, **where).logits
        return logits, torch.zeros((), device=logits.device)

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
    """Return a Hugging Face model with the blocks that its authors say must not be split."""
    return HfNetwork(module, blocks_of(module), spec, type(module).__name__)


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
    assert AutoModelForCausalLM is not None, "there is no config without transformers"
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **SETTINGS)
    model.config.use_cache = False
    return model


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
            assert AutoModelForCausalLM is not None, "there is no config without transformers"
            options |= {"config": config, "use_safetensors": True, "output_loading_info": True}
            model, report = AutoModelForCausalLM.from_pretrained(folder, **options, **SETTINGS)
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
