"""Writes a trained adapter as a PEFT folder, atomically."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trimaran.checkpoint.convert.export_hf import all_tensors, copy_tokenizer_files, write_folder
from trimaran.core import AdapterSection, ModelSection, UserError
from trimaran.models import model_folder, spec_of
from trimaran.models.weight_files import BASE_DIGEST, base_reference
from trimaran.nets import PEFT_CONFIG, PEFT_WEIGHTS, Network, hf_modules, network_of, peft_config, peft_tensors
from trimaran.nets.local_shards import ReadTensor, full_tensor
from trimaran.parallel.mesh import StageMap


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """What a PEFT folder says besides tensors: model, digest of the base, and `hf_modules` of the whole network."""

    section: ModelSection
    base: Mapping[str, Any]
    modules: frozenset[str]

    @property
    def adapter(self) -> AdapterSection:
        assert self.section.adapter is not None, "only runs with an adapter have these"
        return self.section.adapter


def save_adapter(
    networks: Sequence[Network],
    folder: Path,
    read_facts: Callable[[], AdapterFacts],
    *,
    rank: int,
    stages: StageMap,
    add_files: Callable[[Path], None],
    read: ReadTensor = full_tensor,
    report_progress: Callable[[], None] = lambda: None,
) -> None:
    """Write a trained adapter to `folder`; see `save_network`. Every rank must call it; rank 0 reads the facts."""
    tensors = all_tensors(networks, stages, rank, partial(peft_tensors, read=read), report_progress)
    if rank != 0:
        deque(tensors, maxlen=0)
        return
    try:
        facts = read_facts()
        write_peft_folder(folder, facts, tensors, add_files=add_files, replace=True, report_progress=report_progress)
    except (OSError, SafetensorError) as error:
        raise UserError("D006.trained-adapter", where=str(folder), error=error) from None


def write_peft_folder(
    folder: Path,
    facts: AdapterFacts,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    add_files: Callable[[Path], None],
    replace: bool = False,
    report_progress: Callable[[], None] = lambda: None,
) -> None:
    """Write a PEFT folder with the base's tokenizer and digest; see `write_hf_folder`. All tensors are in memory."""
    by_name = dict(tensors)
    origin = model_folder(facts.section.path) if facts.section.path else None

    def fill(draft: Path) -> None:
        config = peft_config(facts.adapter, by_name, facts.modules)
        config["base_model_name_or_path"], config["revision"] = base_reference(facts.section)
        (draft / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(by_name, draft / PEFT_WEIGHTS, metadata={"format": "pt"})
        (draft / BASE_DIGEST).write_text(json.dumps(facts.base, indent=2) + "\n", encoding="utf-8")
        report_progress()
        add_files(draft)
        if origin:
            copy_tokenizer_files(origin, draft)

    write_folder(folder, fill, replace=replace, report_progress=report_progress)


def whole_modules(section: ModelSection, network: Network) -> frozenset[str]:
    """Return the modules of the whole network, given a stage of it, for `AdapterFacts`."""
    if not section.kind.is_hf:
        spec = spec_of(section)
        assert spec is not None, "only an unknown Hugging Face architecture has no spec"
        with torch.device("meta"):
            network = network_of(spec)
    return frozenset(hf_modules(network))
