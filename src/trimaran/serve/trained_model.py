"""Loads trained weights to generate with: a run's, a checkpoint's, a folder's, an adapter's (merged or attached)."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trimaran.checkpoint.convert.convert import MODEL_PREFIX, read_full_tensor
from trimaran.checkpoint.load_state import DiskSource
from trimaran.checkpoint.verify_checkpoint import refuse_damaged_weights
from trimaran.core import AdapterSection, ImageRules, ModelSection, UserError, read_regular_text
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.data import TokenShards
from trimaran.data.text.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from trimaran.models import model_folder, read_json, spec_of, weight_files
from trimaran.models.from_hf import unsupported
from trimaran.models.internvl import with_image_tokens
from trimaran.models.resolve import recipe_image_rules
from trimaran.models.vlm_config import vlm_from_disk
from trimaran.models.weight_files import BASE_DIGEST, base_difference, changed_base, compute_base_digest
from trimaran.nets import Network, initialise
from trimaran.nets.adapters.attach import attach_adapter
from trimaran.nets.adapters.lora_linear import adapter_parameters, merge_in_place
from trimaran.nets.adapters.peft_format import (
    DOWN,
    MAX_CONFIG_BYTES,
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    PREFIX,
    SUFFIXES,
    WEIGHT,
    load_peft_adapter,
)
from trimaran.nets.decoder.moe import MoeLayer
from trimaran.nets.hf_weights import damaged
from trimaran.parallel.precision import DTYPES
from trimaran.serve.settings import TrainedWeights
from trimaran.train.generation.generate import (
    TOKENIZER,
    CachedLogits,
    NextTokenModel,
    first_device,
    load_trained,
    open_saved_tokenizer,
    unfilled_network,
    whole_sequence_logits,
)

Dtype = Literal["fp32", "bf16"]
FillAdapter = Callable[[Network, AdapterSection], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTexts:
    """Turns texts and images into a model's tokens and back, without its network."""

    tokenizer: Tokenizer
    stop_ids: frozenset[int]  # a text ends with one of them
    rules: ImageRules | None = None  # how the model sees images; None if it does not
    template: str = "auto"  # the chat template that it was trained with: a name, or `auto`


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
    """Computes the next token of one sequence."""

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


def open_trained(weights: TrainedWeights, dtype: str, *, cache: Path | None) -> TrainedModel:
    """Return the model on the first device. `dtype` auto: on a GPU as trained or as its config says, on a CPU fp32."""
    device = first_device()
    network, computed = open_network(weights, device, dtype, cache=cache)
    texts = open_texts(weights)
    return TrainedModel(network=network, tokenizer=texts.tokenizer, device=device, dtype=computed,
                        stop_ids=texts.stop_ids, rules=texts.rules, template=texts.template)  # fmt: skip


def open_network(
    weights: TrainedWeights, device: torch.device, dtype: str, *, cache: Path | None
) -> tuple[Network, torch.dtype]:
    """Return the network of these weights on `device`, with an adapter merged, and the dtype that it computes in.

    Raises UserError if an adapter was trained on another base. Digests of bases are kept in `cache`.
    """
    section = section_of(weights)
    seed = weights.recipe.train.seed if weights.recipe else 0
    if has_adapter(weights) and weights.step is None:
        refuse_other_base(section, saved_base(weights.path), seed=seed, cache=cache)
        network = load_adapted(section, device, fill_from_peft(weights.path), seed=seed, adapter=weights.path)
    elif has_adapter(weights):
        refuse_damaged_weights(weights.path)
        source = DiskSource(weights.path)
        refuse_other_base(section, source.progress.get("base") or {}, seed=seed, cache=cache)

        def fill(network: Network, _: AdapterSection) -> None:
            _copy_tensors(adapter_parameters(network.module), source, weights.path)

        network = load_adapted(section, device, fill, seed=seed)
    elif weights.step is None:
        network = load_trained(section, weights.path, device)
    else:
        network = unfilled_network(section, device)
        load_checkpoint(network, weights.path)
    network.module.eval().requires_grad_(False)
    if dtype == "auto":
        dtype = usual_dtype(weights, section) if DEVICE_TRAITS[device.type].prefers_16_bits else "fp32"
    if dtype == "bf16":
        compute_in_bf16(network.module)
    return network, DTYPES[dtype]


def open_texts(weights: TrainedWeights) -> ModelTexts:
    recipe, section, tokenizer = weights.recipe, section_of(weights), tokenizer_of(weights)
    if recipe is not None:
        rules = recipe_image_rules(recipe.model_copy(update={"model": section}))
        template = recipe.data.samples.template
    else:  # the model's own template, if it has one
        spec, content = spec_of(section), getattr(tokenizer, "content", None)
        rules = None if spec is None else spec.images()
        template = "model" if content is not None and content.templates else "auto"
    # The ids that end a text, by generation_config.json and config.json.
    folder = _config_folder(weights, section)
    files = [folder / name for name in ("generation_config.json", "config.json")] if folder else []
    configs = [read_json(file, limit_bytes=MAX_CONFIG_BYTES) for file in files if file.is_file()]
    parts = [part for config in configs for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    found = [part.get("eos_token_id") for part in parts]
    ends = {id_ for each in found for id_ in (each if isinstance(each, list) else [each]) if isinstance(id_, int)}
    stop_ids = frozenset([tokenizer.end_id, *ends])
    return ModelTexts(tokenizer=tokenizer, stop_ids=stop_ids, rules=rules, template=template)


def section_of(weights: TrainedWeights) -> ModelSection:
    """Return the model section of the weights; of an adapter, that of its base, which describes it if a run trained it.

    A saved folder describes itself: its origin may be gone.
    """
    recipe = weights.recipe
    if recipe is None:
        return section_of_folder(base_of_peft(weights.path) if has_adapter(weights) else weights.path)
    if has_adapter(weights) or weights.step is not None:
        return recipe.model
    if recipe.model.kind.is_plugin:  # its folder does not describe it to anybody else
        return recipe.model.model_copy(update={"path": str(weights.path)})
    return ModelSection(
        family=recipe.model.family, path=str(weights.path), trust_remote_code=recipe.model.trust_remote_code
    )


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


def tokenizer_of(weights: TrainedWeights) -> Tokenizer:
    """Return the tokenizer beside the weights, or that of the run's data."""
    folder, recipe = weights.run.model if weights.run else weights.path, weights.recipe
    if (folder / TOKENIZER).is_file():
        return open_saved_tokenizer(folder)
    if recipe is None:
        if has_tokenizer(folder):
            return load_tokenizer(str(folder))
        raise UserError("T011.folder-holds-no-tokenizer", where=str(folder))
    if recipe.data.source == "shards" and recipe.data.path:
        return TokenShards.open(Path(recipe.data.path)).tokenizer
    return load_tokenizer(recipe.data.tokenizer)


def usual_dtype(weights: TrainedWeights, section: ModelSection) -> str:
    """Return the dtype in which a run computed, or in which a folder's weights are stored."""
    if weights.run is None:
        return stored_dtype(_config_folder(weights, section) or weights.path)
    return "fp32" if weights.run.read_plan().precision == "fp32" else "bf16"


def stored_dtype(folder: Path) -> Dtype:
    """Return the dtype that config.json says that the weights have; if it does not say, the one that they have."""
    config = read_json(folder / "config.json", limit_bytes=MAX_CONFIG_BYTES)
    name = config.get("dtype", config.get("torch_dtype"))
    is_half = name in ("bfloat16", "float16")
    if name is None and (files := sorted(folder.glob("*.safetensors"))):
        with suppress(SafetensorError), safe_open(files[0], framework="pt") as tensors:  # reported when it is loaded
            is_half = any(tensors.get_slice(each).get_dtype() in ("BF16", "F16") for each in tensors.keys())  # noqa: SIM118
    return "bf16" if is_half else "fp32"


def _config_folder(weights: TrainedWeights, section: ModelSection) -> Path | None:
    """Return the folder whose configs say how a text ends; None if the model has none, because it was never saved."""
    if weights.step is None and (weights.path / "config.json").is_file():
        return weights.path
    return model_folder(section.path) if section.path else None


def compute_in_bf16(module: nn.Module) -> None:
    """Cast the weights of matmuls in place, as autocast would in every forward. Vectors and routers stay fp32."""
    routers = {part.gate.weight for part in module.modules() if isinstance(part, MoeLayer)}
    for parameter in module.parameters():
        if parameter.ndim > 1 and parameter not in routers and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


def load_checkpoint(network: Network, path: Path) -> None:
    """Copy a checkpoint into a network in place: graphs stay valid. A damaged one is refused first."""
    refuse_damaged_weights(path)
    source = DiskSource(path)
    buffers = [(name, each) for name, each in network.module.named_buffers() if MODEL_PREFIX + name in source.index]
    _copy_tensors([*network.module.named_parameters(), *buffers], source, path)


@torch.no_grad()
def _copy_tensors(targets: Iterable[tuple[str, Tensor]], source: DiskSource, path: Path) -> None:
    for name, target in targets:
        if MODEL_PREFIX + name not in source.index:
            raise UserError("K025.checkpoint-not-weight-generate", where=str(path), name=name)
        target.copy_(read_full_tensor(source, MODEL_PREFIX + name))


def has_adapter(weights: TrainedWeights) -> bool:
    """Return whether the weights are those of an adapter, beside a base elsewhere."""
    recipe = weights.recipe
    return recipe.model.adapter is not None if recipe is not None else (weights.path / PEFT_CONFIG).is_file()


def load_adapted(
    section: ModelSection, device: torch.device, fill: FillAdapter, *, seed: int = 0, adapter: Path | None = None
) -> Network:
    """Return the unsharded network of `section` on `device` with its adapter merged.

    `fill` gives the adapter its values. A section that does not describe its adapter takes the description from the
    PEFT folder `adapter`. `seed` is that of a base without weight files.
    """
    network = unfilled_network(section, device)
    if not section.kind.is_hf:
        if section.path and weight_files(model_folder(section.path)):
            network.load(model_folder(section.path))
        else:
            spec = spec_of(section)
            assert spec is not None, "our own networks always have a spec"
            initialise(network.module, seed=seed, spec=spec)
    described = section.adapter
    if described is None:
        assert adapter is not None, "an adapter is described by the recipe or by its folder"
        described = described_adapter(network, adapter)
    attach_adapter(network, described.model_copy(update={"base": "auto"}))
    fill(network, described)
    merge_in_place(network.module)
    return network


def fill_from_peft(folder: Path) -> FillAdapter:
    return lambda network, section: load_peft_adapter(network, folder, section)


def described_adapter(network: Network, folder: Path) -> AdapterSection:
    config = read_json(folder / PEFT_CONFIG, limit_bytes=MAX_CONFIG_BYTES)
    try:
        with safe_open(folder / PEFT_WEIGHTS, framework="pt") as file:
            names = {name.removeprefix(PREFIX) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise damaged(folder / PEFT_WEIGHTS, error) from None
    adapted = {name.removesuffix(DOWN) for name in names if name.endswith(DOWN)}
    trained = {name for name in names if not name.endswith(SUFFIXES)}
    linears = (name for name, part in network.module.named_modules() if isinstance(part, nn.Linear))
    targets = (name for name in linears if network.hf_parameter(name + WEIGHT).name.removesuffix(WEIGHT) in adapted)
    parameters = (name for name, _ in network.module.named_parameters(remove_duplicate=False))
    train = (name.rpartition(".")[0] for name in parameters if network.hf_parameter(name).name in trained)
    return AdapterSection(
        kind="dora" if config.get("use_dora") else "lora",
        rank=config.get("r", 8),
        alpha=config.get("lora_alpha", 8),
        rank_stabilised=bool(config.get("use_rslora")),
        targets=tuple(targets),
        towers=tuple(network.towers),
        train=tuple(dict.fromkeys(train)),
    )


def base_of_peft(folder: Path) -> Path:
    named = read_json(folder / PEFT_CONFIG, limit_bytes=MAX_CONFIG_BYTES).get("base_model_name_or_path")
    if not named or not (Path(named) / "config.json").is_file():
        raise UserError("K051.base-adapter", where=str(folder / PEFT_CONFIG), named=named)
    return Path(named)


def refuse_other_base(
    section: ModelSection,
    saved: Mapping[str, Any],
    *,
    seed: int,
    cache: Path | None,
    report_progress: Callable[[float], None] = lambda fraction: None,
) -> None:
    """Raise UserError if the base of `section` is not the one with the digest `saved`. An empty one is not compared."""
    if saved:
        now = compute_base_digest(section, seed, cache, report_progress)
        if difference := base_difference(saved, now.as_dict()):
            raise changed_base(f"model.path ({section.path})", difference)


def saved_base(folder: Path) -> dict[str, Any]:
    """Return the digest of the base that is saved beside an adapter; empty if PEFT has written it."""
    file = folder / BASE_DIGEST
    try:
        found = json.loads(read_regular_text(file)) if file.exists() else {}
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise UserError("K051.digest-base", where=str(file))
    return found
