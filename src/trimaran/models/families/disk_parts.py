"""Where the parameters of our decoder are in the tensors of a Hugging Face folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trimaran.models.spec import ModelSpec

HEAD = "lm_head.weight"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DiskPart:
    """The region of a tensor on disk that holds a parameter, or one expert of a stacked one.

    `shape` is that of the whole tensor on disk. `region` are one slice for each of its first dims, or an index; what it
    leaves out is taken whole. The parameter is the region, transposed in its last two dims if `transposed`.
    """

    name: str
    shape: Shape
    region: tuple[slice | int, ...] = ()
    transposed: bool = False


# Returns where a parameter of this name and full shape is: one part, or one for each expert of a stacked weight.
PartsOf = Callable[[str, Shape, ModelSpec], Sequence[DiskPart]]


def plain_parts(name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    """Return the parts of an architecture that has our names, behind `model.`, and one tensor for each expert."""
    if name.startswith("lm_head."):
        return [DiskPart(name, shape)]
    layer, experts, projection = name.rpartition(".experts.")
    if not experts:
        return [DiskPart(f"model.{name}", shape)]
    names = (f"model.{layer}.experts.{expert}.{projection}.weight" for expert in range(shape[0]))
    return [DiskPart(each, shape[1:]) for each in names]


def renamed(parts: Sequence[DiskPart], names: Mapping[str, str]) -> list[DiskPart]:
    """Return the parts under other names on disk: each key of `names` in a name is replaced by its value."""
    found = []
    for part in parts:
        name = part.name
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        found.append(replace(part, name=name))
    return found


def packed_heads(name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    """Return the rows of `qkv_proj` that hold a projection of queries, keys or values; [] for other parameters."""
    owner, found, leaf = _projection(name, ("q_proj", "k_proj", "v_proj"))
    if not found:
        return []
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    start = {"q_proj": 0, "k_proj": queries, "v_proj": queries + keys}[found]
    whole = (queries + 2 * keys, *shape[1:])
    return [DiskPart(f"model.{owner}.qkv_proj.{leaf}", whole, (slice(start, start + shape[0]),))]


def packed_feed_forward(name: str, shape: Shape) -> list[DiskPart]:
    """Return the rows of `gate_up_proj` that hold a gate or up projection; [] for other parameters."""
    owner, found, leaf = _projection(name, ("gate_proj", "up_proj"))
    if not found:
        return []
    start = 0 if found == "gate_proj" else shape[0]
    whole = (2 * shape[0], *shape[1:])
    return [DiskPart(f"model.{owner}.gate_up_proj.{leaf}", whole, (slice(start, start + shape[0]),))]


def _projection(name: str, names: tuple[str, ...]) -> tuple[str, str, str]:
    """Return the module around a projection of one of these names, its own name and that of its parameter."""
    module, _, leaf = name.rpartition(".")
    owner, _, found = module.rpartition(".")
    return (owner, found, leaf) if found in names else ("", "", "")
