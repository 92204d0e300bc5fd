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


def renamed_parts(names: Mapping[str, str], name: str, shape: Shape, spec: ModelSpec) -> list[DiskPart]:
    """Return `plain_parts` under other names on disk: each key of `names` in a name is replaced by its value."""
    found = []
    for part in plain_parts(name, shape, spec):
        disk = part.name
        for ours, theirs in names.items():
            disk = disk.replace(ours, theirs)
        found.append(replace(part, name=disk))
    return found


def packed_rows(spec: ModelSpec) -> dict[str, dict[str, int]]:
    """Return the modules that some architectures pack, with the rows of the projections in each."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "qkv_proj": {"q_proj": queries, "k_proj": keys, "v_proj": keys},
        "gate_up_proj": {"gate_proj": spec.ffn, "up_proj": spec.ffn},
    }


def packed_parts(name: str, shape: Shape, spec: ModelSpec, *packed: str) -> list[DiskPart]:
    """Return the rows of one of the `packed` modules that hold a projection; `plain_parts` of other parameters."""
    module, _, leaf = name.rpartition(".")
    owner, _, found = module.rpartition(".")
    for each in packed:
        rows = packed_rows(spec)[each]
        if found in rows:
            start = sum(list(rows.values())[: list(rows).index(found)])
            whole = (sum(rows.values()), *shape[1:])
            return [DiskPart(f"model.{owner}.{each}.{leaf}", whole, (slice(start, start + shape[0]),))]
    return plain_parts(name, shape, spec)
