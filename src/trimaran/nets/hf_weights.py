"""Reads and writes a Decoder's weights as Hugging Face safetensors. No pickle is read: it can run any program."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.core.regular_files import check_regular_file
from trimaran.models import ModelSpec, weight_files
from trimaran.nets.adapters.nf4_linear import loadable_weights, weight_to_fill
from trimaran.nets.decoder import Decoder
from trimaran.nets.local_shards import gathered, is_on_meta, local_part, local_slices

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
STACKED_NDIM = 3  # of the stacked experts' weights; every other weight is a matrix or a vector


def load_hf_weights(module: nn.Module, folder: Path, report_progress: Callable[[], None] = lambda: None) -> None:
    """Fill a Decoder in place from the safetensors in `folder`, in the parameters' own dtypes.

    Each rank reads only the rows it holds, and a stage only its layers. Names and shapes are checked before the first
    value is written; on the meta device nothing else is done. An adapter is not filled. `report_progress` is called
    after each tensor.
    """
    assert isinstance(module, Decoder), "only our decoder has these names"
    with ExitStack() as stack, torch.no_grad():
        sources = open_weights(folder, stack)
        parameters = loadable_weights(module)
        _refuse_mismatch(parameters, sources, folder, others=_shapes_of_all(module.spec))
        if is_on_meta(module):
            return
        try:
            for name, parameter in parameters.items():
                with weight_to_fill(module, name, parameter) as target:
                    _copy(target, name, sources)
                report_progress()
        except SafetensorError as error:
            raise damaged(folder, error) from None


def hf_tensors(module: nn.Module, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a Decoder unsharded, on the CPU, under its Hugging Face name; a tied head is omitted.

    So is the last stage's copy of a tied embedding, which the first stage has too. Each item is a collective for
    sharded weights: every rank must take every item.
    """
    assert isinstance(module, Decoder), "only our decoder has these names"
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if spec.tied and (name == HEAD or (name == EMBEDDING and not module.is_first)):
            continue
        value = full_tensor(parameter)
        names = disk_names(name, value.shape)
        if value.ndim < STACKED_NDIM:
            yield names[0], value
        else:
            yield from ((each, expert.clone()) for each, expert in zip(names, value, strict=True))


def full_tensor(parameter: Tensor) -> Tensor:
    """Return the unsharded value on the CPU. A collective for sharded parameters.

    A parameter's own `gather_full`, if it has one, replaces the default.
    """
    gather = getattr(parameter, "gather_full", None)
    value = gather() if gather else parameter.detach()
    return gathered(value).cpu().contiguous()


def open_weights(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the open file that holds each tensor, by the tensor's name."""
    sources: dict[str, Any] = {}
    files = weight_files(folder)
    if not files:
        raise UserError("M020", "the folder holds no weights", where=str(folder),
                        fix="name a folder with model.safetensors, or train a preset from scratch")  # fmt: skip
    for path in files:
        try:
            check_regular_file(path, follow_links=True)  # in a Hugging Face cache every file is a link
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise damaged(path, error) from None
        sources |= dict.fromkeys(file.keys(), file)
    return sources


def _shapes_of_all(spec: ModelSpec) -> dict[str, torch.Size]:
    """Return the shape of every parameter of the complete model, by name."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Decoder(spec).named_parameters()}


def _refuse_mismatch(
    parameters: Mapping[str, Tensor], sources: Mapping[str, Any], folder: Path, *, others: Mapping[str, torch.Size]
) -> None:
    missing, misshapen = [], []
    expected = {each for name, shape in others.items() for each in disk_names(name, shape)}
    for name, parameter in parameters.items():
        names = disk_names(name, parameter.shape)
        shape = list(parameter.shape if parameter.ndim < STACKED_NDIM else parameter.shape[1:])
        for each in names:
            if each not in sources:
                missing.append(each)
            elif (found := sources[each].get_slice(each).get_shape()) != shape:
                misshapen.append(f"{each} {found} (the model has {shape})")
    # Some checkpoints contain a tied head, which is not read, and the oldest Llamas their rotary tables.
    unexpected = [each for each in sources if each not in expected and each != HEAD and "rotary_emb" not in each]
    lists = {"missing": missing, "wrong shape": misshapen, "unexpected": unexpected}
    if problems := [f"{what}: {first_few(names)}" for what, names in lists.items() if names]:
        raise UserError("M021", f"the weights do not match the model; {'; '.join(problems)}", where=str(folder),
                        fix="use the config.json that belongs to the weights, and leave model.shape empty")  # fmt: skip


def _copy(parameter: Tensor, name: str, sources: Mapping[str, Any]) -> None:
    local, here = local_part(parameter), local_slices(parameter)
    names = disk_names(name, parameter.shape)
    if not local.numel():
        return
    if local.ndim < STACKED_NDIM:
        local.copy_(sources[names[0]].get_slice(names[0])[here])
    else:
        for expert, each in zip(local, names[here[0]], strict=True):
            expert.copy_(sources[each].get_slice(each)[here[1:]])


def disk_names(name: str, shape: torch.Size) -> list[str]:
    """Return the parameter's Hugging Face name, or one name for each expert of a stacked weight."""
    if name == HEAD:
        return [name]
    layer, experts, projection = name.rpartition(".experts.")
    if not experts:
        return [f"model.{name}"]
    return [f"model.{layer}.experts.{expert}.{projection}.weight" for expert in range(shape[0])]


def first_few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def damaged(where: Path, error: Exception) -> UserError:
    return UserError(
        "M022",
        f"the weights cannot be read: {getattr(error, 'strerror', None) or error}",
        where=str(where),
        fix="copy or download them again",
    )
