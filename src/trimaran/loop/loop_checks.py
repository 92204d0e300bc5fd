"""The checks of a loop: of losses, gradients and updates in its first steps, and of equal weights on all ranks."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain
from itertools import count as counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from trimaran.core import UserError
from trimaran.loop.loop_context import LoopContext, generator_states
from trimaran.loop.loop_optimizers import parameters_of
from trimaran.loop.loss_reduction import CHECK_OFF, accumulation_divisor, calling_line, check_divisor
from trimaran.loop.row_dependence import mark_outputs, row_dependence
from trimaran.parallel import all_gather_int64, all_gather_json
from trimaran.train import bit_checksum


class GradientWatch:
    """The gradients of parameters as the last backward has left them."""

    def __init__(self) -> None:
        self._records: list[tuple[nn.Parameter, Tensor, int, Tensor | None]] = []

    def record(self, parameters: Iterable[nn.Parameter]) -> None:
        self._records = []
        for each in parameters:
            if (gradient := each.grad) is not None:
                # The norm: torch counts neither writes to `gradient.data` nor those of `_foreach` to DTensors.
                size = None if gradient.is_sparse else local_tensor(gradient).norm()
                self._records.append((each, gradient, gradient._version, size))

    def forget(self) -> None:
        self._records = []

    def num_changed(self) -> int:
        """Return how many gradients have been written or replaced since `record`, or all if all were removed."""
        if all(parameter.grad is None for parameter, *_ in self._records):
            return len(self._records)
        num = 0
        for parameter, gradient, version, size in self._records:
            if parameter.grad is not None:
                is_other = parameter.grad is not gradient or gradient._version != version
                if not is_other and size is not None:
                    now = local_tensor(gradient).norm()
                    is_other = bool((now != size) & ~(now.isnan() & size.isnan()))
                num += is_other
        return num


def local_tensor(gradient: Tensor) -> Tensor:
    """Return the part of a gradient that this rank holds."""
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


FIRST_STEPS = 3
MAX_LOSSES = 4  # that are differentiated twice
_numbers = counter()


class LoopChecks:
    """The checks of a loop's first steps. Mistakes are raised in `before_step`, on all ranks alike.

    With `is_on` false, only the calls are checked: who changes gradients, and who updates.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        context: LoopContext,
        *,
        is_on: bool,
        is_sharded: bool,
    ) -> None:
        self._model, self._optimizers, self._context = model, optimizers, context
        self._is_on, self._is_sharded = is_on, is_sharded
        self._owner = f"output of loop {next(_numbers)}"
        self._num_steps = self._num_losses = self.num_backwards = 0
        self._divisors: set[int] = set()
        self._watch = GradientWatch()
        self._found: UserError | None = None
        self._random_state, self._drawn = b"", ""  # before the latest forward; its hash if numbers were drawn in it
        self._warned_of_noise = self._warned_of_hooks = self._is_updating = self._is_gathered = False
        for each in optimizers:
            each.register_step_pre_hook(self._before_update)
        self._hooks: list[Any] = []
        if is_on:  # watch random numbers and outputs, and the dimension along which sequence layers run
            self._hooks.append(model.register_forward_pre_hook(Hook(self._before_forward)))
            self._hooks.append(model.register_forward_hook(Hook(self._after_forward), prepend=not is_sharded))
            for name, module in model.named_modules():
                if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
                    self._hooks.append(module.register_forward_pre_hook(Hook(self._check_sequence, name)))

    @property
    def is_first(self) -> bool:
        """Whether this is one of the first steps."""
        return self._num_steps < FIRST_STEPS

    @property
    def _is_split(self) -> bool:
        """Whether a step has several batches: of other ranks, or micro-batches. One batch is always whole."""
        return self._context.world_size > 1 or not self._context.is_synced or self.num_backwards > 0

    def before_backward(self, loss: Tensor, *, count: float | None, is_mean: bool) -> None:
        """Look at a loss before its graph is freed. `count` is None if it is not read, to not wait for the device."""
        context = self._context
        self._check_gradients()
        is_whole = context.is_padding or self._is_gathered or not self._is_split
        if self._is_on and not context.is_padding and is_mean:
            self._divisors.add(accumulation_divisor(loss))
        if self._is_on and not is_whole and is_mean and count is not None:
            try:
                check_divisor(loss, count=count, reads_device=self.is_first)
            except UserError as error:
                self._found = self._found or error
        if self._is_on and self.is_first and not is_whole and self._num_losses < MAX_LOSSES:
            self._num_losses += 1
            cause = row_dependence(loss, self._owner, context.num_rows_here)
            if cause is None or self._found is not None:
                return
            ranks, rows = context.world_size, context.num_rows_here
            seen = f"the {rows} rows of one of {ranks} ranks" if ranks > 1 else f"the {rows} rows of a micro-batch"
            if cause == "dimension":
                what = (
                    f"in this loss the {rows} rows of a rank depend on each other, but not those of another dimension"
                )
                fix = "if the rows of the batch are dimension 1: loop.local_rows(batch, batch_dim=1)"
            elif cause == "normalised":
                what = f"this loss normalises over {seen}, not over those of the whole batch"
                fix = "compute it from the rows of all ranks: outputs = loop.gather(outputs), without micro-batches"
            else:
                what = f"this loss is no sum over rows: it compares or combines {seen}, not those of the whole batch"
                fix = ("compute it from the rows of all ranks: outputs = loop.gather(outputs), without micro-batches; "
                       "or sum a loss for each row")  # fmt: skip
            self._found = UserError("P140", what, where=calling_line(), fix=f"{fix}. {CHECK_OFF}")

    def found_foreign_gradients(self) -> None:
        """Note gradients that were there before the first backward of a step, unless they are zero."""
        gradients = [each.grad for each in parameters_of(self._optimizers) if each.grad is not None]
        if self.is_first and any(bool(local_tensor(each).count_nonzero()) for each in gradients if not each.is_sparse):
            self._found = self._found or foreign_gradients()

    def before_gather(self) -> None:
        """Note that a loss sees the rows of all ranks, and whether it misses those of the step's other batches."""
        self._is_gathered = torch.is_grad_enabled()
        is_whole = self._context.is_synced and not self.num_backwards
        if self._is_on and not is_whole and torch.is_grad_enabled():
            self._found = self._found or UserError(
                "P140.loop-gather-returns", where=calling_line(), check_off=CHECK_OFF
            )

    def after_backward(self) -> None:
        self.num_backwards += 1
        self._is_gathered = False
        if self.is_first:
            self._watch.record(parameters_of(self._optimizers))

    def before_step(self) -> None:
        """Raise what any rank has found. Every rank must call it."""
        self._check_gradients()
        if self.is_first:
            self._warned_of_hooks = self._warned_of_hooks or warn_of_hooks(self._model)
        if not self.num_backwards and any(each.grad is not None for each in parameters_of(self._optimizers)):
            self._found = self._found or foreign_gradients()
        steps = self.num_backwards, self.num_backwards * self._context.world_size  # of all ranks, in one process
        if self.num_backwards > 1 and self._divisors in ({each} for each in steps):
            self._found = self._found or UserError(
                "P144.each-losses-divided",
                where=calling_line(),
                fix='leave out the division: loop.backward(loss, num_samples=len(y), reduction="mean"). ' + CHECK_OFF,
                num_backwards=self.num_backwards,
                most=max(self._divisors),
            )
        if self.is_first:
            self._agree()
        elif self._found is not None:
            raise self._found

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Let the optimizers update, which they may do here only; then begin the next step."""
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False
        self._num_steps += 1
        self.forget()
        if not self.is_first:
            for each in self._hooks:
                each.remove()
            self._hooks = []

    def forget(self) -> None:
        """Forget the losses since the last step."""
        self.num_backwards = 0
        self._divisors.clear()
        self._watch.forget()

    def _agree(self) -> None:
        """Raise this rank's mistake, or that of another rank; warn if all ranks have drawn the same random numbers."""
        found = self._found
        if self._context.world_size > 1:
            mine = None if found is None else [found.code, found.what, found.where, found.fix]
            ranks = all_gather_json([mine, self._drawn])
            for rank, (other, _) in enumerate(ranks):
                if found is None and other is not None:
                    code, what, where, fix = other
                    found = UserError(code, f"{what} (on rank {rank})", where=where, fix=fix)
            states = {state for _, state in ranks}
            if len(states) == 1 and states != {""} and not self._warned_of_noise and found is None:
                self._warned_of_noise = True
                if self._context.rank == 0:
                    warn(
                        "P147",
                        "all ranks have drawn the same random numbers in the model, each for its own rows "
                        "(dropout, noise). Call trimaran.seed_rank(seed) after prepare, and draw batches from a "
                        f"generator of their own; ignore this if all rows share them. {CHECK_OFF}.",
                    )
        if found is not None:
            raise found

    def _check_gradients(self) -> None:
        if num_changed := self._watch.num_changed():
            self._watch.forget()
            self._found = self._found or UserError(
                "P141.gradients-changed-cleared", where=calling_line(), num_changed=num_changed
            )

    def _before_update(self, optimizer: Optimizer, *args: Any) -> None:
        if self._is_updating:
            return
        gradients = [local_tensor(each.grad) for each in parameters_of([optimizer]) if each.grad is not None]
        if self.num_backwards or any(bool((each != 0).any()) for each in gradients if not each.is_sparse):
            raise UserError("P142.optimizer-stepped-itself", where=calling_line())

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        self._random_state = random_state(self._context.device)

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> Any:
        """Mark the outputs. FSDP's hooks on them gather weights: those of a sharded model are marked behind these."""
        if not torch.is_grad_enabled():
            return None
        is_drawn = random_state(self._context.device) != self._random_state
        self._drawn = blake2b(self._random_state, digest_size=8).hexdigest() if is_drawn else ""
        if self._is_sharded:
            output = tree_map(
                lambda each: each.view_as(each) if isinstance(each, Tensor) and each.grad_fn is not None else each,
                output,
            )
        mark_outputs(output, self._owner)
        return output

    def _check_sequence(self, name: str, module: Any, args: Any) -> None:
        context = self._context
        along = int(bool(module.batch_first))
        shape = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else ()
        rows, dim = context.num_rows_here, context.batch_dim
        if not torch.is_grad_enabled() or len(shape) < 3 or dim != along or not self._is_split or rows < 2:
            return
        other = shape[1 - along]
        if shape[along] == rows != other and any(
            len(each) > 1 and each[along] == rows and each[1 - along] == other
            for each in context.row_shapes[:MAX_LOSSES]
        ):
            self._found = self._found or UserError(
                "P145.runs-along-dimension",
                where=name or type(module).__name__,
                name=name or "the model",
                kind=type(module).__name__,
                along=along,
                batch_dim=1 - along,
                batch_first=not along,
                check_off=CHECK_OFF,
            )


def foreign_gradients() -> UserError:
    return UserError("P142.gradients-step", where=calling_line())


class Hook:
    """A hook of a module. It does nothing in copies and pickles of the module."""

    def __init__(self, function: Callable[..., Any], *first: Any) -> None:
        self._function, self._first = function, first

    def __call__(self, *args: Any) -> Any:
        return None if torch.compiler.is_compiling() else self._function(*self._first, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (do_nothing,)


def do_nothing(*args: Any) -> None: ...


def warn_of_hooks(model: nn.Module) -> bool:
    """Warn of a hook of the user on the gradient of a parameter; return whether there is one."""
    for name, each in model.named_parameters():
        after = getattr(each, "_post_accumulate_grad_hooks", None) or {}
        hooks = [getattr(hook, "func", hook) for hook in (*(each._backward_hooks or {}).values(), *after.values())]
        if any(not (hook.__module__ or "").startswith(("trimaran.", "torch.")) for hook in hooks):
            warn(
                "P148",
                f"{name} has a gradient hook. In loop.backward gradients are sums over this rank's samples, and no "
                "means: a hook that masks or scales them is right, one that clips or adds is not, and sharding removes "
                "hooks. Change gradients in loop.step(before_update=change), which gets the mean over all samples.",
            )
            return True
    return False


def warn(code: str, text: str) -> None:
    warnings.warn(f"{code}: {text}", stacklevel=5)


def random_state(device: torch.device) -> bytes:
    """Return the states of torch's generators of the CPU and the device."""
    return b"".join(each.numpy().tobytes() for each in generator_states(device))


CHECK_EVERY = 100
MAX_NAMES = 5
DIFFERENT_BUFFERS = "P135"


def check_same_model(model: nn.Module) -> None:
    """Raise UserError on all ranks if they have built different models. Every rank must call it."""
    if dist.get_world_size() == 1:
        return
    parts = [
        (name, list(each.shape), str(each.dtype), each.requires_grad)
        for name, each in chain(model.named_parameters(), model.named_buffers())
    ]
    digest = int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), signed=True)
    digests = all_gather_int64(np.array([digest]))
    if (digests == digests[0]).all():
        return
    every = all_gather_json([[name, f"{shape} {dtype}{'' if trained else ', frozen'}"]
                             for name, shape, dtype, trained in parts])  # fmt: skip
    first = dict(map(tuple, every[0]))
    rank = next(number for number, each in enumerate(every) if each != every[0])
    other = dict(map(tuple, every[rank]))
    name = next((each for each in [*first, *other] if first.get(each) != other.get(each)), "the order of its parts")
    raise UserError(
        "P138.ranks-built-different",
        where="prepare(model, optimizer)",
        name=name,
        first=first.get(name, "missing"),
        other=other.get(name, "missing"),
        rank=rank,
    )


class ReplicaAgreement:
    """Compares replicated weights and buffers of all ranks after the first updates, then now and then."""

    def __init__(self, model: nn.Module, *, is_on: bool) -> None:
        self._model, self._is_on = model, is_on and dist.get_world_size() > 1
        self._num_steps, self._warned = 0, False

    def check(self, step: int) -> None:
        """Raise UserError on all ranks if their weights differ, and warn if their buffers do."""
        self._num_steps += 1
        if not self._is_on or (self._num_steps > FIRST_STEPS and self._num_steps % CHECK_EVERY):
            return
        named = self._model.named_parameters()
        if differing := _differing({name: each.detach() for name, each in named if not isinstance(each, DTensor)}):
            raise UserError("P134.after-step-ranks", where="loop.step()", step=step, listed=_listed(differing))
        buffers = {}  # except BatchNorm's, which has its own warning; see `batch_norm_warning`
        for path, module in self._model.named_modules() if not self._warned else ():
            if not isinstance(module, AnyBatchNorm):
                buffers |= {f"{path}.{name}": buffer for name, buffer in module.named_buffers(recurse=False)}
        if differing := _differing({name.removeprefix("."): each for name, each in buffers.items()}):
            self._warned = True
            if dist.get_rank() == 0:
                warnings.warn(
                    f"{DIFFERENT_BUFFERS}: after step {step} the ranks hold different buffers: {_listed(differing)}. "
                    "Each rank updates them from its own rows; loop.evaluate and checkpoints use rank 0's. Update them "
                    "from the rows of all ranks, for instance with torch.distributed.all_reduce.",
                    stacklevel=3,
                )


def _differing(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that are not equal bit by bit on all ranks. Every rank must call it."""
    strided = {name: each for name, each in tensors.items() if each.layout is torch.strided and each.numel()}
    if not strided:
        return []
    checksums = torch.stack([bit_checksum(each) for each in strided.values()]).cpu().numpy()
    gathered = all_gather_int64(checksums)
    unequal = (gathered != gathered[0]).any(0)
    return [name for name, differs in zip(strided, unequal, strict=True) if differs]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
