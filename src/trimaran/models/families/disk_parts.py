"""Where the parameters of our decoder are in the tensors of a Hugging Face folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
