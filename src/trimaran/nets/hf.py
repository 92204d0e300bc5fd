"""Any local causal language model that transformers knows. An extra, so only the hf family imports this."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.models import ModelSpec, model_folder, weight_files
from trimaran.nets.attention import document_mask, document_positions
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

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        apart = {}
        if documents is not None:
            apart = {"position_ids": document_positions(documents), "attention_mask": document_mask(documents)}
        logits = self.module(input_ids=tokens, use_cache=False, **apart).logits
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


def hf_network(module: nn.Module, spec: ModelSpec | None) -> HfNetwork:
    """Return a Hugging Face model with the blocks that its authors say must not be split."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    blocks = tuple(part for part in module.modules() if type(part).__name__ in names)
    return HfNetwork(module, blocks, spec, type(module).__name__)


def load_hf_model(path: Path, *, trust_remote_code: bool, seed: int) -> nn.Module:
    """Return the model in the folder with fp32 weights; random ones, drawn from `seed`, when it holds only a config.

    Nothing is downloaded, no pickle is read, and code that comes with the model runs only if it is trusted.
    """
    if AutoConfig is None or AutoModelForCausalLM is None or disable_progress_bar is None:
        raise UserError("M023", "Hugging Face models need the transformers package", where="model.family",
                        fix="pip install trimaran[hf]")  # fmt: skip
    disable_progress_bar()  # a rank has a log, not a screen
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    folder, missing = model_folder(str(path)), []
    files = weight_files(folder)
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        if files:
            settings |= {"config": config, "use_safetensors": True, "output_loading_info": True}
            model, report = AutoModelForCausalLM.from_pretrained(folder, **options, **settings)
            missing = sorted(report["missing_keys"])
        else:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **settings)
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
