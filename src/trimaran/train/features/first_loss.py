"""Compares the first loss of a Hugging Face model with transformers' own forward, once, before the first step.

The reference is a new module of the same class, built from the model's folder, with the weights that are about to be
trained. It gets tokens and nothing else: none of our attention, positions, masks, kernels, hooks or fused losses. Each
document of a packed row is computed alone. A second call with other later tokens shows whether the model reads them.

Nothing of the run changes: all forwards are in evaluation mode and without gradients, and random states are restored.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from trimaran.core import DEVICE_TRAITS, ModelSection, Plan, UserError
from trimaran.data import IGNORED, Inputs, Loader
from trimaran.machine import free_bytes
from trimaran.nets import LoraLinear, Network, is_dtensor, loadable_weights, merged_weight, open_hf_model
from trimaran.nets.local_shards import gathered
from trimaran.nets.nf4_linear import CODES, Nf4Weight
from trimaran.parallel import RankMesh, all_gather_json, autocast
from trimaran.train.build import WorkerParts
from trimaran.train.loss.cross_entropy import summed_loss
from trimaran.train.loss.objective import LanguageObjective
from trimaran.train.process.rank_setup import RankInfo
from trimaran.train.steppers.stepper import TorchStepper

MAX_TOKENS = 1024  # of the row
MIN_TOKENS = 16  # fewer show too little
MAX_DOCUMENTS = 8  # of the row
MAX_GATHERED = 10_000_000_000  # weights that a rank gathers from others, which takes about a second
FORWARDS = 3  # ours, the model's own, and that with other later tokens
MAX_FLOPS = {"cpu": 2e11, "cuda": 5e13}  # of all forwards, which take about a second

# Rounding explains so large a difference of a mean loss of 1 or less, and PER_TOKEN times that for a single token.
TOLERANCE = {"fp32": 2e-5, "fp16": 5e-3, "bf16": 1e-2, "fp8": 4e-2}
PER_TOKEN = 10.0
# Rounding explains that so large a part of the logits changes with other later tokens: experts get other batches.
CHANGED_LOGITS = {"fp32": 1e-4, "fp16": 0.05, "bf16": 0.1, "fp8": 0.2}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRow:
    """The row to compare, with labels of the compared documents only, and the positions of each in `documents`."""

    inputs: dict[str, Tensor]
    documents: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLosses:
    """The loss in nats of transformers' own forward, summed over the `targets` of the row.

    `packed`: it has other documents. `changed`: how much of the first half's logits changed with later tokens.
    """

    total: float
    targets: int
    packed: bool
    changed: float


@torch.no_grad()
def check_first_loss(parts: WorkerParts) -> None:
    """Raise UserError if the first loss is not that of the model's own forward. Every rank must call it.

    Does nothing where this takes more than about a second: see docs/guides/models.md.
    """
    plan, rank_info, networks, ranks = parts.context.plan, parts.context.rank_info, parts.networks, parts.ranks
    stepper, objective, feed = parts.trainer.stepper, parts.training_data.objective, parts.trainer.feed()
    can_evaluate = isinstance(stepper, TorchStepper) and not plan.engine_traits.keeps_states_elsewhere
    if not can_evaluate or not isinstance(objective, LanguageObjective):
        return
    device = ranks.device
    with torch.random.fork_rng(devices=[device] if DEVICE_TRAITS[device.type].has_own_generator else []):
        with Loader(feed, steps=1) as loader:
            inputs = next(loader).to(device).micro(0)
        multiple = 2 * plan.mesh.cp * plan.mesh.tp  # what a sequence is split into
        count = sum(each.numel() for each in networks[0].whole_module.parameters())
        most = min(MAX_TOKENS, int(MAX_FLOPS[device.type] / (2 * FORWARDS * max(1, count))))
        row = first_row(inputs, most, multiple=multiple)
        is_cheap = row is not None and _is_cheap(networks, plan, rank_info, device)
        model = _own_model(parts.context.recipe.model) if is_cheap else None
        if not all(all_gather_json(model is not None)):
            return
        assert model is not None
        assert row is not None
        weights = _whole_weights(model, networks, ranks, plan)
        own = _own_losses(model, weights, row, plan, device)
        del weights
        host = {f"host_{name}": each.cpu() for name, each in row.inputs.items() if name == "documents"}
        stepper.set_training(False)
        torch.manual_seed(0)
        with torch.compiler.set_stance("force_eager") if plan.compile else nullcontext():
            ours = float(stepper.evaluate_one(row.inputs | host)[0])
        stepper.set_training(True)
    if DEVICE_TRAITS[device.type].has_own_memory:
        torch.cuda.empty_cache()
    mine = [ranks.data_rank, ours, asdict(own) if own is not None and ranks.counts_samples else None]
    everywhere = all_gather_json(mine)
    for data_rank, _, numbers in everywhere:
        if numbers is not None:
            total = sum(part for owner, part, _ in everywhere if owner == data_rank)
            refuse_difference(OwnLosses(**numbers), total, plan.precision, type(model).__name__)


def refuse_difference(own: OwnLosses, ours: float, precision: str, architecture: str) -> None:
    """Raise if the summed loss `ours` or the model's own two calls differ by more than rounding explains."""
    off = "train.check_first_loss: false trains all the same"
    if own.changed > CHANGED_LOGITS[precision]:
        raise UserError(
            "M062.reads-tokens-predict", where="model.path", architecture=architecture, changed=own.changed, off=off
        )
    mean, expected = ours / own.targets, own.total / own.targets
    allowed = TOLERANCE[precision] * max(1.0, expected) * (1 + PER_TOKEN / math.sqrt(own.targets))
    if not abs(mean - expected) > allowed:  # NaN is for the guard
        return
    numbers = f"the first loss is {mean:.6g} instead of {expected:.6g}, over {own.targets} targets"
    if own.packed:
        raise UserError("M061.not-compute-documents", where="data", architecture=architecture, numbers=numbers, off=off)
    raise UserError("M060.not-compute-here", where="model.path", architecture=architecture, numbers=numbers, off=off)


def first_row(inputs: Inputs, most: int, *, multiple: int = 1) -> FirstRow | None:
    """Return a row of a micro-batch, cut to `most` tokens: one with several documents if there is one.

    In a longer row each document is cut. None if the rows hold images or too few tokens.
    """
    if any(name in inputs and len(inputs[name]) for name in ("patches", "features")):
        return None
    tokens, labels, documents = inputs["tokens"], inputs["labels"], inputs.get("documents")
    number, inside = 0, torch.arange(tokens.shape[1])
    if documents is not None:
        number = int(((documents > 0) & (labels != IGNORED)).sum(1).argmax())
        parts = documents[number].cpu()
        if len(parts) > most and int(parts.max()) > 0:
            starts = torch.searchsorted(parts, parts)
            inside = inside[inside - starts < most // 4]
    inside = inside[: min(len(inside), most) // multiple * multiple]
    row = {
        name: each[..., number : number + 1, :][..., inside.to(each.device)].contiguous()
        for name, each in inputs.items()
        if each.shape[-2:] == tokens.shape
    }
    positions = [torch.arange(row["tokens"].shape[1], device=row["tokens"].device)]
    if "documents" in row:
        positions = [(row["documents"][0] == each).nonzero()[:, 0] for each in row["documents"][0].unique()]
    compared = [each for each in positions if bool((row["labels"][0, each] != IGNORED).any())]
    # The first document is computed as if it were alone in any case.
    compared = compared[len(compared) > 1 :][:MAX_DOCUMENTS]
    if sum(map(len, compared)) < MIN_TOKENS:
        return None
    kept = torch.zeros_like(row["labels"], dtype=torch.bool)
    for each in compared:
        kept[0, each] = True
    labels = row["labels"].masked_fill(~kept, IGNORED)
    return FirstRow(inputs=row | {"labels": labels}, documents=tuple(compared))


def _own_model(section: ModelSection) -> nn.Module | None:
    """Return a new model of the folder, without weights; None if it cannot be built without them."""
    assert section.path is not None, "a Hugging Face model has a folder"
    options: dict[str, Any] = {"trust_remote_code": section.trust_remote_code, "seed": 0, "without_weights": True}
    try:
        return open_hf_model(Path(section.path), **options)[0].eval()
    except Exception as error:  # any error of the model's own code
        _say_not_checked(error)
        return None


def _is_cheap(networks: Sequence[Network], plan: Plan, rank_info: RankInfo, device: torch.device) -> bool:
    """Return whether weights that this rank lacks are few and fit into memory.

    False for models that a short forward changes: RWKV rescales its weights, BigBird gives up sparse attention.
    """
    config: Any = networks[0].module.config
    is_changed = getattr(config, "rescale_every", 0) or getattr(config, "attention_type", "") == "block_sparse"
    if plan.offload == "parameters" or plan.offloads_to_disk or is_changed:
        return False
    held, changed = set[str](), set[str]()
    for network in networks:
        held |= {name for name, each in network.module.named_parameters() if not is_dtensor(each)}
        parts = network.module.named_modules()
        changed |= {f"{name}.weight" for name, each in parts if isinstance(each, LoraLinear | Nf4Weight)}
    whole = loadable_weights(networks[0].whole_module)
    missing = sum(each.numel() for name, each in whole.items() if name not in held - changed)
    width = 4 if plan.precision == "fp32" else 2
    on_gpu = DEVICE_TRAITS[device.type].has_own_memory
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else free_bytes() // rank_info.local_world_size
    return missing <= MAX_GATHERED and width * missing <= free // 2


def _whole_weights(model: nn.Module, networks: Sequence[Network], ranks: RankMesh, plan: Plan) -> dict[str, Tensor]:
    """Return the weights that are trained, unsharded and under the new model's names, and the new model's buffers."""
    kind, found = ranks.device.type, {name: each.to(ranks.device) for name, each in model.named_buffers()}
    saved = model.state_dict().keys()
    names = [name for name, _ in model.named_parameters()] + [name for name in found if name in saved]
    here: dict[str, tuple[nn.Module, Tensor]] = {}
    for network in networks:
        tensors = dict(network.module.named_buffers()) | dict(network.module.named_parameters(remove_duplicate=False))
        for name, each in tensors.items():
            owner, _, leaf = name.rpartition(".")
            packed_as = f"{owner}.weight" if leaf == CODES else name
            here.setdefault(packed_as, (network.module.get_submodule(owner), each))
    everywhere = all_gather_json(sorted(here), ranks.group("pp")) if ranks.degrees.pp > 1 else []
    for name in names:
        value: Tensor | None = None  # with the adapter, in the dtype of matmuls if it had to be copied
        if name in here:
            layer, tensor = here[name]
            is_weight = name.rpartition(".")[2] == "weight"
            is_copied = True
            if is_weight and isinstance(layer, LoraLinear):
                value = merged_weight(layer)
            elif is_weight and isinstance(layer, Nf4Weight):
                value = layer.base_weight()
            elif is_dtensor(tensor):
                value = gathered(tensor.detach())
            else:
                value, is_copied = tensor, False
            value = value.detach()
            with autocast(plan, ranks.device):
                if is_copied and torch.is_autocast_enabled(kind) and value.ndim > 1 and value.is_floating_point():
                    value = value.to(torch.get_autocast_dtype(kind))
        if everywhere:
            source = next(stage for stage, each in enumerate(everywhere) if name in each)
            group = ranks.group("pp")
            facts = None if value is None else [[*value.shape], str(value.dtype).removeprefix("torch.")]
            shape, dtype = all_gather_json(facts, group)[source]
            if ranks.rank("pp") != source or value is None:
                value = torch.empty(shape, dtype=getattr(torch, dtype), device=ranks.device)
            value = value.contiguous()
            dist.broadcast(value, group=group, group_src=source)
        assert value is not None, "a plan changes no name"
        found[name] = value
    return found


def _own_losses(
    model: nn.Module, weights: dict[str, Tensor], row: FirstRow, plan: Plan, device: torch.device
) -> OwnLosses | None:
    """Return the losses of transformers' own forward; None if it does not run this way."""
    tokens, labels = row.inputs["tokens"][0], row.inputs["labels"][0]
    number = max(range(len(row.documents)), key=lambda each: len(row.documents[each]))
    longest = row.documents[number]
    half = len(longest) // 2
    replaced = tokens[longest].clone()
    replaced[half:] = replaced[0]

    def logits(ids: Tensor) -> Tensor:
        torch.manual_seed(0)
        with autocast(plan, device):
            return functional_call(model, weights, (), {"input_ids": ids[None], "use_cache": False}).logits[0]

    try:
        outputs = [logits(tokens[positions]) for positions in row.documents]
        first, other = outputs[number][:half].float(), logits(replaced)[:half].float()
    except Exception as error:  # any error of the model's own code
        _say_not_checked(error)
        return None
    pairs = zip(outputs, row.documents, strict=True)
    return OwnLosses(
        total=sum(float(summed_loss(output, labels[positions])) for output, positions in pairs),
        targets=int((labels != IGNORED).sum()),
        packed=len(tokens) > len(longest),
        changed=float((first - other).norm() / (first - first.mean()).norm().clamp(min=1e-30)),
    )


def _say_not_checked(error: Exception) -> None:
    first_line = str(error).strip().partition("\n")[0]
    log.info("the first loss was not compared with transformers' own: %s: %s", type(error).__name__, first_line)
