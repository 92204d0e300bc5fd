"""Where a number that is none was born: which module, on which rank, forwards or backwards.

A step that is refused is computed once more, slowly, with an eye on every module. Steps that are not refused pay
nothing for it.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trimaran.data.loader import Loader
from trimaran.data.step_batch import StepBatch
from trimaran.nets import Network
from trimaran.nets.local_shards import local_part
from trimaran.parallel.gradient_norm import gradient_of
from trimaran.train.agreement import Poll
from trimaran.train.health.guard import Refusal
from trimaran.train.steppers.stepper import PlainStepper, Stepper

MOST_SEARCHES = 3  # of one start: the next bad step would tell the same
LETTER_BYTES, NAMED_CHARACTERS = 1024, 120
What = Literal["weight", "input", "output", "gradient", "not again"]
EARLIER = ("weight", "input", "output", "gradient")  # what causes the next
LAST = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteOrigin:
    """The first thing on this rank that is not finite. `clean`: what came into the module was. `order` counts calls."""

    module: str
    what: What
    order: int = 0
    clean: bool = True


class NonfiniteSearch:
    """Finds where a refused step went wrong. Every rank asks together, and rank 0 gets the answer of all.

    The batch is loaded again, which gives the same one, and goes through the weights as they are now: a refused step
    has not moved them, and one that came after it only a little.
    """

    def __init__(
        self,
        networks: Sequence[Network],
        stepper: Stepper,
        loader_from: Callable[[int], Loader],
        reseed: Callable[[int], None],
        device: torch.device,
    ) -> None:
        self._networks, self._stepper, self._loader_from = networks, stepper, loader_from
        self._reseed, self._device, self._left = reseed, device, MOST_SEARCHES

    def find(self, refusal: Refusal) -> dict[str, Any]:
        """Return what an event tells of the birth in a step that was refused; nothing where nobody looked.

        `what` is a `weight`, an `input`, the `output` of a module or the `gradient` of that, or of a parameter; `not
        again`: the same samples have given finite numbers now, everywhere. Gradients of a pipeline are not looked at.
        """
        if not self._left:
            return {}
        self._left -= 1
        batch = self._load(refusal.step - 1)
        if Poll(batch is None).wait() or batch is None:
            return {}
        self._reseed(batch.step)
        with _unchanged(self._networks), torch.compiler.set_stance("force_eager"):
            before = _in_weights(self._networks) or _in_inputs(batch)
            after = self._computed(batch)  # with all others, who may have found nothing yet
            found = _first_of_all(before or after)
        in_loss = not math.isfinite(refusal.loss)
        again: What = "not again" if in_loss or isinstance(self._stepper, PlainStepper) else "gradient"
        return found or {"module": "", "what": again, "rank": None, "ranks": []}

    def _load(self, step: int) -> StepBatch | None:
        try:
            with self._loader_from(step) as loader:
                return next(loader).to(self._device)
        except Exception:  # a disk may fail one rank only, and the others must hear of it
            return None

    def _computed(self, batch: StepBatch) -> NonfiniteOrigin | None:
        """Compute the step, forward and, where the stepper can do that for nothing but a look, backward."""
        seen = _ModuleWatch()
        with seen.on(self._networks):
            if not isinstance(self._stepper, PlainStepper):
                with torch.no_grad():
                    self._stepper.evaluate(batch)
                return seen.first
            for _ in self._stepper.gradients_again(batch):
                seen.first = seen.first or _in_gradients(self._networks)
        return seen.first


class _ModuleWatch:
    """Looks at what every module gives, and at the gradients of that, until one is not finite."""

    def __init__(self) -> None:
        self.first: NonfiniteOrigin | None = None
        self._calls = 0

    @contextmanager
    def on(self, networks: Sequence[Network]) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, module in _modules(networks):
                hook = partial(self._look, name)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    def _look(self, name: str, module: nn.Module, given: Any, named: Any, out: Any) -> None:
        self._calls += 1
        if self.first is None and not _finite(out):
            self.first = NonfiniteOrigin(module=name, what="output", order=self._calls, clean=_finite((given, named)))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(partial(self._look_back, name))

    def _look_back(self, name: str, gradient: Tensor) -> None:
        if self.first is None and not _finite(gradient):
            self.first = NonfiniteOrigin(module=name, what="gradient", order=self._calls)


def _in_weights(networks: Sequence[Network]) -> NonfiniteOrigin | None:
    return next(
        (NonfiniteOrigin(module=name, what="weight") for name, each in _parameters(networks) if not _finite(each)), None
    )


def _in_inputs(batch: StepBatch) -> NonfiniteOrigin | None:
    bad = (name for name, each in batch.arrays.items() if not _finite(each))
    return next((NonfiniteOrigin(module=name, what="input") for name in bad), None)


def _in_gradients(networks: Sequence[Network]) -> NonfiniteOrigin | None:
    bad = (name for name, each in _parameters(networks) if not _finite(gradient_of(each)))
    return next((NonfiniteOrigin(module=name, what="gradient", order=LAST) for name in bad), None)


def _modules(networks: Sequence[Network]) -> Iterator[tuple[str, nn.Module]]:
    for network in networks:
        for name, module in network.module.named_modules():
            yield name or type(module).__name__, module


def _parameters(networks: Sequence[Network]) -> Iterator[tuple[str, nn.Parameter]]:
    for network in networks:
        yield from network.module.named_parameters()


def _finite(tree: Any) -> bool:
    """Return whether all that is a fraction in `tree` is finite. Nothing as large as a tensor is made for it."""
    for each in tree_leaves(tree):
        part = local_part(each.detach()) if isinstance(each, Tensor) and each.is_floating_point() else None
        if part is not None and part.numel() and not torch.stack(torch.aminmax(part)).isfinite().all():
            return False
    return True


@contextmanager
def _unchanged(networks: Sequence[Network]) -> Iterator[None]:
    """Lend the networks, and put what they count and average besides their weights back afterwards."""
    kept = [(buffer, buffer.clone()) for network in networks for buffer in network.module.buffers()]
    yield
    with torch.no_grad():
        for buffer, before in kept:
            buffer.copy_(before)


def _first_of_all(mine: NonfiniteOrigin | None) -> dict[str, Any]:
    """Return the earliest birth of any rank, on every rank, with all the ranks that found it in the same module.

    Where something came in that was bad already, it was born elsewhere: on the stage before, say.
    """
    short = asdict(mine) | {"module": mine.module[:NAMED_CHARACTERS]} if mine else None
    letter, text = torch.zeros(LETTER_BYTES, dtype=torch.uint8), json.dumps(short).encode()
    letter[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    coordinator = [torch.empty_like(letter) for _ in range(dist.get_world_size())]
    dist.all_gather(coordinator, letter)
    told = [json.loads(each.numpy().tobytes().rstrip(b"\0")) for each in coordinator]
    births = {rank: each for rank, each in enumerate(told) if each}
    if not births:
        return {}
    rank = min(births, key=lambda rank: _how_early(births[rank]))
    first = {name: births[rank][name] for name in ("module", "what")}
    return first | {"rank": rank, "ranks": [other for other, each in births.items() if first.items() <= each.items()]}


def _how_early(birth: Mapping[str, Any]) -> tuple[bool, int, int]:
    return not birth["clean"], EARLIER.index(birth["what"]), birth["order"]
