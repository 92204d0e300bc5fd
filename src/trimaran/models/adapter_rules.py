"""Which recipes can train an adapter, without building the network."""

from collections.abc import Iterable, Mapping, Sequence

from trimaran.core import AdapterSection, ModelSection, Plan, UserError, did_you_mean
from trimaran.models.any_spec import Spec
from trimaran.models.module_names import is_named, linear_names, linear_sizes

ALL_LINEAR, HEAD = "all-linear", "lm_head"
MAX_LISTED_NAMES = 12


def refuse_adapter(section: ModelSection, plan: Plan | None = None, spec: Spec | None = None) -> None:
    """Raise if the model section's adapter contradicts the rest of it or the plan. Without an adapter nothing does.

    `spec` is the shape of a network of ours: its layers must have the names in `targets`, and at least `rank` inputs
    and outputs. A Hugging Face model may have other layers than its shape suggests, so these are checked when it is
    built.
    """
    adapter = section.adapter
    if adapter is None:
        return
    if section.kind.reads == "scenes":
        raise UserError("M055", "a perception model is not trained with an adapter", where="model.adapter",
                        fix="remove model.adapter: these models are small enough to train in full")  # fmt: skip
    both = [tower for tower in section.freeze if tower in (*adapter.towers, *adapter.train)]
    if "language" in section.freeze and not adapter.towers:
        both.append("language")
    if both:
        raise UserError("M056", f"the tower {both[0]} is frozen, and the adapter trains it", where="model.freeze",
                        fix=f"remove {both[0]} from model.freeze: towers without an adapter are frozen "
                        "anyway")  # fmt: skip
    if spec is not None and not section.kind.is_hf:
        _refuse_targets(adapter, spec)
    if plan is not None and not plan.engine_traits.trains_adapters:
        raise UserError("P064", "DeepSpeed's engine does not train adapters here", where="plan.engine",
                        fix="use the torch engine: with plan.sharding it shards the frozen weights too")  # fmt: skip
    if plan is not None and plan.precision == "fp8":
        raise UserError("P066", "a linear layer with an adapter does not compute in fp8", where="plan.precision",
                        fix="use bf16, or leave it out")  # fmt: skip
    if plan is not None and adapter.base == "4bit" and (plan.mesh.tp > 1 or plan.offload == "parameters"):
        field, why = ("mesh.tp", "tp splits") if plan.mesh.tp > 1 else ("offload", "FSDP's offload moves")
        raise UserError("P065", f"4-bit base weights are whole on every rank, and {why} them", where=f"plan.{field}",
                        fix="leave it out, or set model.adapter.base to auto")  # fmt: skip


def _refuse_targets(adapter: AdapterSection, spec: Spec) -> None:
    """Raise if targets have unknown names, or are smaller than the rank; `all-linear` are all but the head.

    Layers that are trained in full have no adapter.
    """
    names = [name for name in _adapted_linears(adapter, spec) if not _is_within(name, adapter.train)]
    if adapter.targets == ALL_LINEAR:
        names = [name for name in names if name.rpartition(".")[2] != HEAD]
    else:
        refuse_unknown_targets(adapter.targets, names)
        names = [name for name in names if any(is_named(name, target) for target in adapter.targets)]
    sizes = linear_sizes(spec)
    refuse_large_rank({name: sizes[name] for name in names}, adapter.rank)


def _is_within(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern names this layer, a module that contains it, or its tower."""
    parts = name.split(".")
    outer = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(is_named(each, pattern) for each in outer for pattern in patterns)


def refuse_large_rank(sizes: Mapping[str, tuple[int, int]], rank: int) -> None:
    """Raise if the rank is larger than one of these layers: then its update would have more values than its weight."""
    name = min(sizes, key=lambda each: (min(sizes[each]), each), default="")
    inputs, outputs = sizes.get(name, (rank, rank))
    if rank > min(inputs, outputs):
        raise UserError("M052", f"the rank is {rank}, and {name} has {inputs} inputs and {outputs} outputs",
                        where="model.adapter.rank", fix=f"use a rank of at most {min(inputs, outputs)}, or leave this "
                        "layer out of targets")  # fmt: skip


def refuse_unknown_targets(targets: Sequence[str], names: Iterable[str]) -> None:
    """Raise unless every target is the name of one of these linear layers."""
    linears = list(names)
    known = last_parts(linears)
    unknown = [each for each in targets if not any(is_named(name, each) for name in linears)]
    if unknown or not targets:
        what = f"no linear layer is called {unknown[0]!r}{did_you_mean(unknown[0], known)}" if unknown else "no targets"
        raise UserError("M054", what, where="model.adapter.targets", fix=f"the linear layers are {listed(known)}")


def _adapted_linears(adapter: AdapterSection, spec: Spec) -> list[str]:
    """Return the names of the linear layers of the adapted towers."""
    if spec.vision is None:
        return linear_names(spec)
    return [name for name in linear_names(spec) if name.split(".")[0] in (adapter.towers or ("language",))]


def last_parts(names: Iterable[str]) -> list[str]:
    """Return the distinct last parts of the names that are no numbers, in order."""
    parts = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return [part for part in parts if not part.isdigit()]


def listed(names: Sequence[str]) -> str:
    """Return the first names as text, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return ", ".join(names[:MAX_LISTED_NAMES]) + more
