"""A DCP checkpoint, Trimaran's or torch FSDP's, becomes a step that a run resumes from."""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from trimaran.checkpoint.convert import Progress, hollow_network, read_whole, refuse_occupied
from trimaran.checkpoint.dcp_read import DcpSource
from trimaran.checkpoint.durable import DurableDisk, remove_tree
from trimaran.checkpoint.manifest import Manifest
from trimaran.checkpoint.rank_share import DTYPE_NAMES, TORCH_DTYPES, RankShare, copy_in, lay_out
from trimaran.checkpoint.step_dirs import draft_path, step_path
from trimaran.checkpoint.tensor_regions import VALUE_BYTES, Index, Whole
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.checkpoint.write_checkpoint import commit, write_share
from trimaran.core import Recipe, UserError
from trimaran.nets import Decoder, Network
from trimaran.nets.hf_weights import disk_names

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"
FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ImportedTensor:
    """A tensor of the run, and the keys in the DCP folder that it is made of: one, or one for each of its experts.

    Without keys it begins as zeros.
    """

    key: str
    whole: Whole
    keys: tuple[str, ...]

    def read(self, source: DcpSource) -> Tensor:
        dtype = TORCH_DTYPES[self.whole.dtype]
        if not self.keys:
            return torch.zeros(self.whole.shape, dtype=dtype)
        values = [read_whole(source, key).to(dtype) for key in self.keys]
        return (values[0] if len(values) == 1 else torch.stack(values)).view(self.whole.shape)


@dataclass(frozen=True, slots=True)
class ImportedTensors:
    """What is taken over from a DCP folder. `step` is the optimizer's; 0 when there are only weights."""

    tensors: tuple[ImportedTensor, ...]
    step: int
    with_moments: bool


def write_arrivals(
    arrivals: ImportedTensors, source: DcpSource, folder: Path, *, about: Manifest, progress: Progress
) -> Path:
    """Write the checkpoint `about` of what arrives into `folder`, a run's, and return where it is.

    Some tensors at a time are in memory, and they make a file as if a rank had written them.
    """
    disk, draft = DurableDisk(), draft_path(folder, about.step, secrets.token_hex(4))
    final = step_path(folder, about.step)
    refuse_occupied(final)
    receipts = []
    done, total = 0, len(arrivals.tensors)
    try:
        for number, batch in enumerate(_batches(arrivals.tensors)):
            share, memory = _staged(batch, source)
            receipts.append(write_share(draft, number, share, memory.numpy().data, previous=None, disk=disk))
            del memory  # before the next is made
            done += len(batch)
            progress("writing the checkpoint", done / total)
        commit(draft, final, receipts, about, disk)
    finally:
        if draft.is_dir():
            remove_tree(draft, disk)
    return final


def _staged(batch: list[ImportedTensor], source: DcpSource) -> tuple[RankShare, Tensor]:
    """Return the tensors of a file, one after the other in memory."""
    pieces = []
    for each in batch:
        tensor = each.read(source)
        pieces.append(TensorShard(key=each.key, tensor=tensor, shape=each.whole.shape, start=(0,) * tensor.ndim))
    share = lay_out(pieces, [(0, piece.shape[0] if piece.shape else 1) for piece in pieces])
    memory = torch.zeros(share.num_bytes, dtype=torch.uint8)
    copy_in(share, pieces, memory)
    return share, memory


def _batches(tensors: Iterable[ImportedTensor]) -> Iterator[list[ImportedTensor]]:
    """Yield them in order, as many at a time as are worth a file."""
    batch: list[ImportedTensor] = []
    num_bytes = 0
    for each in tensors:
        batch.append(each)
        num_bytes += prod(each.whole.shape) * VALUE_BYTES[each.whole.dtype]
        if num_bytes >= FILE_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class Naming:
    """What a DCP folder calls the weights: what stands before every name, and the names, by ours."""

    prefix: str
    names: Mapping[str, tuple[str, ...]]

    def keys(self, name: str) -> tuple[str, ...]:
        return tuple(self.prefix + each for each in self.names[name])

    def absent(self, index: Index) -> list[str]:
        return [key for name in self.names for key in self.keys(name) if key not in index]


def find_arrivals(source: DcpSource, recipe: Recipe) -> ImportedTensors:
    """Return where in `source` every tensor of the recipe's run is.

    Names may have anything in front, such as `model.` or `app.model.`, and may be Hugging Face's. Weights are taken
    over in fp32, and so are moments where the run keeps them so. Moments that are not there begin as zeros.
    """
    network = hollow_network(recipe.model)
    wanted = {name: tuple(each.shape) for name, each in network.module.named_parameters()}
    naming = _naming(network, wanted, source)
    weights = [
        ImportedTensor(f"model/{name}", Whole("F32", shape), naming.keys(name)) for name, shape in wanted.items()
    ]
    states = _states(source, naming)
    exact = recipe.train.optimizer.states == "fp32"
    if not states and not exact:
        raise UserError("K027", "the checkpoint has no optimizer states, and only those in fp32 can begin as zeros",
                        where=str(source.folder),
                        fix="import it into a run with train.optimizer.states=fp32")  # fmt: skip
    moments = [each for name in wanted for each in _moments(name, wanted[name], states.get(name, {}), source)]
    if exact:
        moments = [replace(each, whole=Whole("F32", each.whole.shape)) for each in moments]
    arrivals = (*weights, *_buffers(network, naming, source), *moments)
    for each in arrivals:
        _refuse_shape(each, source)
    steps = [read_whole(source, each.keys[0]) for each in moments if each.key.split("/")[1] == STEP and each.keys]
    return ImportedTensors(arrivals, int(max(steps, default=torch.zeros(()))), bool(steps))


def _buffers(network: Network, naming: Naming, source: DcpSource) -> Iterator[ImportedTensor]:
    """Yield the buffers that belong to a state dict and are there."""
    buffers = dict(network.module.named_buffers())
    for name, each in network.module.state_dict().items():
        if name in buffers and naming.prefix + name in source.index:
            whole = Whole(DTYPE_NAMES[each.dtype], tuple(each.shape))
            yield ImportedTensor(f"model/{name}", whole, (naming.prefix + name,))


def _naming(network: Network, wanted: Mapping[str, tuple[int, ...]], source: DcpSource) -> Naming:
    """Return the naming under which all weights are there, or say what is missing from the best one."""
    ways: list[dict[str, tuple[str, ...]]] = [{name: (name,) for name in wanted}]
    if isinstance(network.module, Decoder):
        ways.append({name: tuple(disk_names(name, torch.Size(shape))) for name, shape in wanted.items()})
    tried = [Naming(each, names) for names in ways for each in _prefixes(source.index, next(iter(names.values()))[0])]
    best = min(tried, key=lambda each: len(each.absent(source.index)), default=None)
    absent = best.absent(source.index) if best else list(wanted)
    if best is None or absent:
        raise UserError("K023", f"the checkpoint lacks {len(absent)} of the weights of this run's model, such as "
                        f"{', '.join(absent[:3])}", where=str(source.folder),
                        fix="import it into a run whose recipe names the model that was trained")  # fmt: skip
    return best


def _prefixes(keys: Iterable[str], name: str) -> list[str]:
    """Return what stands before `name` in the keys that end with it, the shortest first."""
    return sorted({key.removesuffix(name) for key in keys if key == name or key.endswith(f".{name}")}, key=len)


def _states(source: DcpSource, naming: Naming) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the keys of the optimizer's states, by our parameter and state."""
    first = next(iter(naming.names.values()))[0]
    by_place: dict[str, dict[str, str]] = {}
    for key in source.index:
        place, _, state = key.rpartition(".")
        by_place.setdefault(place, {})[state] = key
    prefixes = _prefixes((place for place, states in by_place.items() if MOMENTS[0] in states), first)
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for prefix in prefixes[:1]:
        for name, theirs in naming.names.items():
            states = [by_place.get(prefix + each, {}) for each in theirs]
            shared = [state for state in states[0] if all(state in each for each in states)]
            found[name] = {state: tuple(each[state] for each in states) for state in shared}
    return found


def _moments(
    name: str, shape: tuple[int, ...], states: Mapping[str, tuple[str, ...]], source: DcpSource
) -> Iterator[ImportedTensor]:
    """Yield what AdamW keeps of one parameter; in eight bits there are scales as well."""
    if STEP not in states or not all(each in states for each in MOMENTS):
        states = dict.fromkeys((*MOMENTS, STEP), ())
    for state, keys in states.items():
        base = state.partition("_scale")[0]
        if state == STEP:
            yield ImportedTensor(f"optimizer/{STEP}/{name}", Whole("F32", ()), keys[:1])
        elif base in MOMENTS:
            has = source.index[keys[0]].whole if keys else Whole("F32", shape)
            yield ImportedTensor(
                f"optimizer/{state}/{name}", Whole(has.dtype, shape if state == base else has.shape), keys
            )


def _refuse_shape(arrival: ImportedTensor, source: DcpSource) -> None:
    shape, count = arrival.whole.shape, len(arrival.keys)
    for key in arrival.keys:
        found = source.index[key].whole.shape
        if (count, *found) != shape and not (count == 1 and found == shape):
            raise UserError("K023", f"the checkpoint has {key} as {list(found)}, this run's model as {list(shape)}",
                            where=str(source.folder),
                            fix="import it into a run whose recipe names the model that was trained")  # fmt: skip
