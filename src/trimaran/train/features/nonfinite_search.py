"""Finds where a NaN or Inf began, and whether it comes again when another rank computes the same batch.

If it does, the data are at fault, else a device. The ranks of each data-parallel group send their batch to the next
group, and all compute again. A group is all ranks that share a batch (tp, cp and pp), since none of them can compute it
alone.
"""

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trimaran.core import Mesh
from trimaran.data import Loader, StepBatch
from trimaran.nets import MoeLayer, Network, local_part, separate_modules
from trimaran.parallel import all_gather_json, recv_json, send_json
from trimaran.train.agreement import FlagAllReduce
from trimaran.train.health.guard import RefusedStep
from trimaran.train.steppers.stepper import PlainStepper, Stepper


def data_rank_of(rank: int, mesh: Mesh) -> int:
    return rank // (mesh.cp * mesh.tp) % mesh.dp


def receive_neighbour_batch(batch: StepBatch, mesh: Mesh) -> StepBatch:
    """Send this rank's batch, which is on the host, to the next data-parallel group; return that of the one before.

    Every rank must call it, and there must be two groups or more.
    """
    rank, here, width = dist.get_rank(), data_rank_of(dist.get_rank(), mesh), mesh.cp * mesh.tp
    receiver, sender = (rank + ((here + shift) % mesh.dp - here) * width for shift in (1, -1))
    if here % 2:  # in a ring, not all may send first
        received = recv_json(sender)
        send_json(_encode(batch), receiver)
    else:
        send_json(_encode(batch), receiver)
        received = recv_json(sender)
    arrays = {name: _tensor(dtype, shape, text) for name, (dtype, shape, text) in received["arrays"].items()}
    offsets = {name: tuple(each) for name, each in received["offsets"].items()}
    sample_ids = tuple(received["sample_ids"])
    return replace(batch, arrays=arrays, offsets=offsets, num_valid=received["num_valid"], sample_ids=sample_ids)


def judge_reproduction(
    first: dict[str, Any], again: dict[str, Any], suspects: Sequence[int], mesh: Mesh
) -> dict[str, Any]:
    """Return the `reproduced` field of a `skip` event.

    `first` is what the ranks found with their own batches, `again` with those of their neighbours; empty if nothing.
    `suspects` are the ranks with a bad loss in the step itself. `on_rank` is the rank that computed the batch again,
    None if unknown.
    """
    ranks = [*first.get("ranks", ())] or [*suspects]
    sources = {data_rank_of(each, mesh) for each in ranks}
    if mesh.dp == 1:
        return _answer(first.get("rank"), ON_SAME_DEVICE[bool(first)], again=bool(first), same_device=True)
    if len(sources) != 1:  # the gradients of all ranks were reduced, so none of them is known to be the first
        outcome = "it came again: the data or the model" if again else "all were finite: suspect the hardware"
        return _answer(again.get("rank"), f"each batch was computed on another rank, and {outcome}", again=bool(again))
    source, rank = sources.pop(), first.get("rank", ranks[0])
    target = (source + 1) % mesh.dp
    on_rank = rank + (target - source) * mesh.cp * mesh.tp
    found_in = {data_rank_of(each, mesh) for each in again.get("ranks", ())}
    if target in found_in:
        verdict = f"the same batch gives it again on rank {on_rank}: the data or the model, not the device"
    else:
        more = f", and rank {rank} fails with another batch too" if source in found_in else ""
        verdict = f"the same batch is finite on rank {on_rank}{more}: suspect the device of rank {rank}, not the data"
    return _answer(on_rank, verdict, again=target in found_in)


def _answer(on_rank: int | None, verdict: str, *, again: bool, same_device: bool = False) -> dict[str, Any]:
    return {"on_rank": on_rank, "again": again, "same_device": same_device, "verdict": verdict}


ON_SAME_DEVICE = {
    False: "the same batch is finite again on the same device: a one-off, such as a hardware error",
    True: "the same batch gives it again on the same device; no other rank can compute it, so it may be the data or "
    "the device",
}


def _encode(batch: StepBatch) -> dict[str, Any]:
    arrays = {}
    for name, each in batch.arrays.items():
        flat = each.contiguous().reshape(-1)
        text = base64.b64encode(flat.view(torch.uint8).numpy().tobytes() if len(flat) else b"").decode()
        arrays[name] = [str(each.dtype).removeprefix("torch."), [*each.shape], text]
    return {"arrays": arrays, "offsets": {name: [*each] for name, each in batch.offsets.items()},
            "num_valid": batch.num_valid, "sample_ids": [*batch.sample_ids]}  # fmt: skip


def _tensor(dtype: str, shape: Sequence[int], text: str) -> Tensor:
    data = bytearray(base64.b64decode(text))
    if not data:
        return torch.empty(*shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(*shape)


MAX_SEARCHES = 3  # per start of the process: later bad steps usually have the same origin
MAX_NAME_CHARACTERS = 120
What = Literal["weight", "input", "output", "gradient", "not again"]
CAUSAL_ORDER = ("weight", "input", "output", "gradient")  # each can cause the next
AFTER_ALL_CALLS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteOrigin:
    """The first NaN or Inf on this rank. `clean`: the module's inputs were finite. `order` counts module calls."""

    module: str
    what: What
    order: int = 0
    clean: bool = True


class NonfiniteSearch:
    """Computes a refused step again and finds where it first became NaN or Inf.

    The same batch is loaded again and computed with the current weights. The refused step did not change them; a step
    after it may have, a little.
    """

    def __init__(
        self,
        networks: Sequence[Network],
        stepper: Stepper,
        loader_from: Callable[[int], Loader],
        reseed: Callable[[int], None],
        device: torch.device,
        mesh: Mesh,
    ) -> None:
        self._networks, self._stepper, self._loader_from = networks, stepper, loader_from
        self._reseed, self._device, self._mesh, self._left = reseed, device, mesh, MAX_SEARCHES

    def find(self, refusal: RefusedStep) -> dict[str, Any]:
        """Return the fields `born` and `reproduced` of a `skip` event, the same on every rank; empty without a search.

        Every rank must call it. `born` is the origin, and `reproduced` is as in `judge_reproduction`. `what` is a
        `weight`, an `input`, the `output` of a module, or the `gradient` of an output or a parameter. `not again`: this
        time the same samples gave finite numbers everywhere. Gradients are not checked in a pipeline.
        """
        if not self._left:
            return {}
        self._left -= 1
        batch: StepBatch | None = None
        with suppress(Exception), self._loader_from(refusal.step - 1) as loader:  # may fail on one rank only
            batch = next(loader)
        if FlagAllReduce(batch is None).wait() or batch is None:
            return {}
        with unchanged_buffers(self._networks), torch.compiler.set_stance("force_eager"):
            first = self._find_in(batch)
            in_loss = not math.isfinite(refusal.loss)
            can_repeat = in_loss or isinstance(self._stepper, PlainStepper)
            otherwise: What = "not again" if can_repeat else "gradient"
            born = first or {"module": "", "what": otherwise, "rank": None, "ranks": []}
            if not can_repeat or first.get("what") == "weight":  # bad weights make every batch bad
                return {"born": born}
            again = self._find_in(receive_neighbour_batch(batch, self._mesh)) if self._mesh.dp > 1 else {}
        return {"born": born, "reproduced": judge_reproduction(first, again, refusal.ranks, self._mesh)}

    def _find_in(self, host_batch: StepBatch) -> dict[str, Any]:
        """Compute a batch and return the first NaN or Inf of all ranks; empty if there is none."""
        batch = host_batch.to(self._device)
        self._reseed(batch.step)
        before = None
        if (name := _first_bad(_parameters(self._networks))) is not None:
            before = NonfiniteOrigin(module=name, what="weight")
        elif (name := _first_bad(batch.arrays.items())) is not None:
            before = NonfiniteOrigin(module=name, what="input")
        after = self._recompute(batch)  # every rank must take part, also one that has found something already
        return _first_over_ranks(before or after)

    def _recompute(self, batch: StepBatch) -> NonfiniteOrigin | None:
        """Compute the step again: forward and, if the stepper can do it without an update, backward."""
        watch, modules = _ModuleWatch(), (each for _, each in _modules(self._networks))
        with separate_modules(modules), ExitStack() as hooks:
            for name, module in _modules(self._networks):
                hook = partial(watch.check_output, name)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            if not isinstance(self._stepper, PlainStepper):
                with torch.no_grad():
                    self._stepper.evaluate(batch)
                return watch.first
            for _ in self._stepper.recompute_gradients(batch):
                gradients = ((name, each.grad) for name, each in _parameters(self._networks))
                if watch.first is None and (name := _first_bad(gradients)) is not None:
                    watch.first = NonfiniteOrigin(module=name, what="gradient", order=AFTER_ALL_CALLS)
        return watch.first


class _ModuleWatch:
    """Checks the outputs of every module and their gradients, until one is NaN or Inf."""

    def __init__(self) -> None:
        self.first: NonfiniteOrigin | None = None
        self._calls = 0

    def check_output(self, name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self._calls += 1
        if self.first is None and not _is_finite(out):
            is_clean = _is_finite((args, kwargs))
            self.first = NonfiniteOrigin(module=name, what="output", order=self._calls, clean=is_clean)
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(partial(self._check_gradient, name))

    def _check_gradient(self, name: str, gradient: Tensor) -> None:
        if self.first is None and not _is_finite(gradient):
            self.first = NonfiniteOrigin(module=name, what="gradient", order=self._calls)


def _first_bad(named: Iterable[tuple[str, Any]]) -> str | None:
    return next((name for name, each in named if not _is_finite(each)), None)


def _modules(networks: Sequence[Network]) -> Iterator[tuple[str, nn.Module]]:
    for network in networks:
        for name, module in network.module.named_modules():
            yield name or type(module).__name__, module


def _parameters(networks: Sequence[Network]) -> Iterator[tuple[str, nn.Parameter]]:
    for network in networks:
        yield from network.module.named_parameters()


def _is_finite(tree: Any) -> bool:
    """Return whether all floating-point tensors in `tree` are finite, without allocating a tensor of their size."""
    for each in tree_leaves(tree):
        part = local_part(each.detach()) if isinstance(each, Tensor) and each.is_floating_point() else None
        if part is not None and part.numel() and not torch.stack(torch.aminmax(part)).isfinite().all():
            return False
    return True


@contextmanager
def unchanged_buffers(networks: Sequence[Network]) -> Iterator[None]:
    """Restore buffers and the counts of routers after the `with` block, which is between two steps."""
    saved = [(buffer, buffer.clone()) for network in networks for buffer in network.module.buffers()]
    yield
    with torch.no_grad():
        for buffer, before in saved:
            buffer.copy_(before)
    for each in (module for network in networks for module in network.module.modules()):
        if isinstance(each, MoeLayer):
            each.take_routing_stats()


def _first_over_ranks(mine: NonfiniteOrigin | None) -> dict[str, Any]:
    """Return the earliest origin of all ranks, on every rank, with the ranks that found it in the same module.

    A module whose inputs were bad already is not the origin: that is elsewhere, such as on the pipeline stage before.
    """
    short = asdict(mine) | {"module": mine.module[:MAX_NAME_CHARACTERS]} if mine else None
    origins = {rank: each for rank, each in enumerate(all_gather_json(short)) if each}
    if not origins:
        return {}

    def how_early(rank: int) -> tuple[bool, int, int]:
        origin = origins[rank]
        return not origin["clean"], CAUSAL_ORDER.index(origin["what"]), origin["order"]

    rank = min(origins, key=how_early)
    first = {name: origins[rank][name] for name in ("module", "what")}
    return first | {"rank": rank, "ranks": [other for other, each in origins.items() if first.items() <= each.items()]}
