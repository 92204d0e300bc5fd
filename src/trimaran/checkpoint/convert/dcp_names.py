"""The names of tensors in a DCP export, which match the model that transformers builds."""

from collections.abc import Iterable, Mapping

from torch import nn

from trimaran.models.from_hf import disk_layout
from trimaran.nets import Decoder


def exported_keys(module: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Return the key in the checkpoint of each key in the export.

    A decoder's tensors get their Hugging Face names, and a tied weight all of its names, as in a `state_dict`. A
    decoder with packed or stacked weights keeps its own names, since transformers has other tensors.
    """
    names, found = _names(module), {}
    for key in keys:
        section, _, rest = key.partition("/")
        if section == "model":
            found |= {f"model/{each}": key for each in names.get(rest, (rest,))}
        else:
            state, _, name = rest.partition("/")
            found[f"{section}/{state}/{names.get(name, (name,))[0]}"] = key
    return found


def _names(module: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """Return the exported names of each parameter and buffer; the first is that of the optimizer's states."""
    theirs = _hf_names(module) if isinstance(module, Decoder) else {}
    names: dict[int, list[str]] = {}
    for name, each in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
        names.setdefault(id(each), []).append(name)
    return {some[0]: tuple(theirs.get(each, each) for each in some) for some in names.values()}


def _hf_names(decoder: Decoder) -> dict[str, str]:
    """Return the Hugging Face name of each tensor; an empty mapping unless each is one tensor there."""
    tensors = {**dict(decoder.named_parameters(remove_duplicate=False)), **dict(decoder.named_buffers())}
    persistent = {name: each for name, each in tensors.items() if name in decoder.state_dict()}
    layout, names = disk_layout(decoder.spec), {}
    for name, tensor in persistent.items():
        parts = layout(name, tuple(tensor.shape), decoder.spec)
        if len(parts) != 1 or parts[0].region or parts[0].transposed or parts[0].shape != tuple(tensor.shape):
            return {}
        names[name] = parts[0].name
    return names
