"""What a script would do on its main rank alone, done by all ranks: evaluate, collect and write the weights."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from trimaran.core import UserError
from trimaran.loop.loop_context import LoopContext, as_tree, eval_mode, generator_states, kept_generators, num_rows_of
from trimaran.loop.loop_loader import LoopLoader
from trimaran.nets import gathered
from trimaran.parallel import broadcast_json
from trimaran.train import persistent_buffers

WHERE = "loop.evaluate(measure, batches)"


@torch.no_grad()
def evaluate(context: LoopContext, model: nn.Module, measure: Callable[..., Any], batches: Iterable[Any]) -> Any:
    """Return the sums of what `measure` returns, over all batches and ranks; see `Loop.evaluate`."""
    sums: list[Tensor] = []
    layout = None
    with context.evaluating(), _evaluation_mode(model, context):
        is_dealt = isinstance(batches, LoopLoader)  # yields only this rank's rows
        for batch in batches:
            rows = batch
            if not is_dealt:
                num_rows = num_rows_of(batch, WHERE)
                context.check_same(batch, num_rows=num_rows, where=WHERE)
                rows = context.rows_of(as_tree(batch), 0, num_rows)
            values, layout = tree_flatten(measure(rows))
            values = [torch.as_tensor(each, device=context.device).detach().double() for each in values]
            if any(each.numel() != 1 for each in values):
                raise UserError("P049.evaluate-measure-return", where=WHERE)
            values = [each.reshape(()) for each in values]
            sums = sums or [torch.zeros_like(each) for each in values]
            if not context.is_padding:
                sums = [total + each for total, each in zip(sums, values, strict=True)]
    if layout is None:
        raise UserError("P049.no-batch-evaluate", where=WHERE)
    totals = torch.stack(sums)
    dist.all_reduce(totals)
    return tree_unflatten(totals.tolist(), layout)


@contextmanager
def _evaluation_mode(model: nn.Module, context: LoopContext) -> Iterator[None]:
    """Switch the model to eval mode, with rank 0's buffers. Random generators continue afterwards as if unused."""
    for _, buffer in persistent_buffers(model):
        dist.broadcast(buffer, src=0)
    _, *of_device = generator_states(context.device)
    try:
        with kept_generators(), eval_mode(model):
            yield
    finally:
        for state in of_device:
            torch.cuda.set_rng_state(state, context.device)


@torch.no_grad()
def full_state_dict(model: nn.Module, *, is_main: bool) -> dict[str, Tensor]:
    """Return the whole weights and buffers, on the CPU of the main rank; an empty dict on the others."""
    full: dict[str, Tensor] = {}
    for name, each in model.state_dict().items():
        whole = gathered(each) if isinstance(each, Tensor) else each
        if is_main and isinstance(whole, Tensor):
            full[name] = whole.detach().to("cpu", copy=True)
    return full


def write_weights(file: str | Path, weights: Mapping[str, Tensor]) -> Path:
    """Write rank 0's weights to `file`, whole or not at all. Every rank must call it; all raise, or none does."""
    path, failure = Path(file).absolute(), ""
    if path.suffix != ".safetensors":
        raise UserError(
            "K084.weights-written-safetensors",
            where=f"save_weights({str(file)!r})",
            path=path.with_suffix(".safetensors").name,
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}-", delete=False) as draft:
                temporary = Path(draft.name)
            try:
                save_file({name: each.contiguous() for name, each in weights.items()}, temporary)
                with temporary.open("rb") as written:
                    os.fsync(written.fileno())
                temporary.chmod(0o644)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            failure = error.strerror or str(error)
    if dist.is_initialized():
        failure = broadcast_json(failure)
    if failure:
        raise UserError("K084.weights-cannot-written", where=str(path), failure=failure)
    return path
