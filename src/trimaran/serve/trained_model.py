"""A trained model, ready to generate: its network, its tokenizer, and what its folder says about the end of a text."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trimaran.core import ImageRules, ModelSection, UserError
from trimaran.data.text.tokenizer import Tokenizer
from trimaran.models import read_json, spec_of
from trimaran.models.from_hf import unsupported
from trimaran.models.internvl import with_image_tokens
from trimaran.models.vlm_config import vlm_from_disk
from trimaran.nets import Network
from trimaran.nets.decoder.moe import MoeLayer
from trimaran.train.generation.next_token import CachedLogits, NextTokenModel, whole_sequence_logits

MAX_CONFIG_BYTES = 10_000_000
Dtype = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTexts:
    """Turns texts and images into a model's tokens and back, without its network.

    A text ends with one of `stop_ids`. `rules` say how the model sees images; None if it does not. `template` is the
    chat template that it was trained with, a name or `auto`.
    """

    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    rules: ImageRules | None = None
    template: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel(ModelTexts):
    """A network with weights on `device` that computes in `dtype`, and its texts."""

    network: Network
    device: torch.device
    dtype: torch.dtype

    def new_sequence(self) -> "SequenceModel":
        """Return the model of one growing sequence, with a key-value cache if the architecture has one."""
        return SequenceModel(self)


class SequenceModel:
    """Computes the next token of one sequence. `images` are those of its tokens, in order."""

    def __init__(self, trained: TrainedModel) -> None:
        network, device = trained.network, trained.device
        has_grid = trained.rules is not None and trained.rules.positions == "grid"
        self._trained = trained
        with torch.no_grad(), self._autocast():
            self._cached = CachedLogits(network, device, has_grid=has_grid) if network.has_cache(device) else None
        self._whole = whole_sequence_logits(network, device)

    @property
    def next_token(self) -> NextTokenModel:
        return NextTokenModel(self._logits, self._trained.network.max_seq_len)

    def set_images(self, images: list[Any]) -> None:
        """Use these images in the sequences that follow; those of the sequences before must be the first of them."""
        if self._cached is None:
            assert not images, "every model that sees has a cache"
        else:
            self._cached.images = images

    def _logits(self, ids: Tensor) -> Tensor:
        with self._autocast():
            return self._whole(ids) if self._cached is None else self._cached(ids)

    def _autocast(self) -> AbstractContextManager[object]:
        dtype, device = self._trained.dtype, self._trained.device
        return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def section_of_folder(folder: Path) -> ModelSection:
    """Return the model section of a Hugging Face folder: our own network if it supports the model, else theirs."""
    file = folder / "config.json"
    config = read_json(file, limit_bytes=MAX_CONFIG_BYTES)
    if unsupported(config) is None:
        return ModelSection(family="decoder", path=str(folder))
    try:
        vlm_from_disk(with_image_tokens(config, folder), where=str(file))
    except UserError:
        return ModelSection(family="hf", path=str(folder))
    return ModelSection(family="vlm", path=str(folder))


def image_rules_of(section: ModelSection) -> ImageRules | None:
    """Return how the model sees images; None if it does not."""
    spec = spec_of(section)
    return None if spec is None else spec.images()


def end_ids_of(folder: Path | None) -> frozenset[int]:
    """Return the ids that end a text, by generation_config.json and config.json; none if they do not say."""
    if folder is None:
        return frozenset()
    return frozenset(
        each
        for name in ("generation_config.json", "config.json")
        for each in _end_ids(folder / name)
        if isinstance(each, int)
    )


def _end_ids(file: Path) -> Iterator[Any]:
    if not file.is_file():
        return
    config = read_json(file, limit_bytes=MAX_CONFIG_BYTES)
    for part in (config, config.get("text_config")):
        found = part.get("eos_token_id") if isinstance(part, Mapping) else None
        yield from found if isinstance(found, list) else [found]


def stored_dtype(folder: Path) -> Dtype:
    """Return the dtype that config.json says that the weights have; if it does not say, the one that they have."""
    config = read_json(folder / "config.json", limit_bytes=MAX_CONFIG_BYTES)
    name = config.get("dtype", config.get("torch_dtype"))
    is_half = name in ("bfloat16", "float16")
    if name is None and (files := sorted(folder.glob("*.safetensors"))):
        with suppress(SafetensorError), safe_open(files[0], framework="pt") as tensors:  # reported when it is loaded
            is_half = any(tensors.get_slice(each).get_dtype() in ("BF16", "F16") for each in tensors.keys())  # noqa: SIM118
    return "bf16" if is_half else "fp32"


def compute_in_bf16(module: nn.Module) -> None:
    """Cast the weights of matmuls in place, as autocast would in every forward. Vectors and routers stay fp32."""
    routers = {part.gate.weight for part in module.modules() if isinstance(part, MoeLayer)}
    for parameter in module.parameters():
        if parameter.ndim > 1 and parameter not in routers and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
