"""The exchanges that average compressed gradients over ranks, one generator for each kind of compression.

An exchange takes the gradients of one bucket, by the names of their parameters, and overwrites them with their average
over the ranks. It starts a collective, yields it, and is resumed once it has ended. All ranks have the same exchanges
in the same order and start a collective of each in turn, so that none ever meets another. What is sent for a parameter
does not depend on the others in the bucket.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import Compression

INT8_MAX = 127
BITS = 8


def int8_message(blocks: Tensor, noise: Tensor | float) -> Tensor:
    """Return `blocks` [..., blocks, block] in fp32 as bytes [..., bytes]: int8 codes, then the fp32 scales.

    If `noise` is uniform in [0, 1), values are rounded up or down at random, so that the expected value is exact; 0.5
    rounds to the nearest. The largest value of a block is exact. A block with a NaN or Inf is not finite when it is
    read.
    """
    scales = blocks.abs().amax(-1, keepdim=True) / INT8_MAX
    inverse = torch.where(scales >= torch.finfo(torch.float32).tiny, 1 / scales, 0.0)  # else zeros, or a NaN
    codes = (blocks * inverse).add_(noise).floor_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    bytes_of = [each.flatten(-2).contiguous().view(torch.uint8) for each in (codes, scales)]
    return torch.cat(bytes_of, dim=-1)


def read_int8(message: Tensor, block: int) -> Tensor:
    num_blocks = message.shape[-1] // (block + 4)
    codes, scales = message.split([num_blocks * block, num_blocks * 4], dim=-1)
    values = codes.contiguous().view(torch.int8).float().unflatten(-1, (num_blocks, block))
    return (values * scales.contiguous().view(torch.float32).unsqueeze(-1)).flatten(-2)


def sign_message(blocks: Tensor, counts: Tensor) -> Tensor:
    """Return `blocks` [blocks, block] in fp32 as bytes: a bit for each sign, then the fp32 scales.

    The scale of a block is the mean of its absolute values. `counts` is how many values each block has; those after
    are padding of zeros.
    """
    scales = blocks.abs().sum(-1) / counts
    bits = (blocks >= 0).view(-1, BITS).to(torch.uint8)
    packed = (bits * _bit_values(blocks.device)).sum(-1, dtype=torch.uint8)
    return torch.cat([packed, scales.view(torch.uint8)])


def read_signs(message: Tensor, block: int) -> Tensor:
    num_blocks = len(message) // (block // BITS + 4)
    packed, scales = message.split([num_blocks * block // BITS, num_blocks * 4])
    bits = (packed.unsqueeze(-1) & _bit_values(message.device)) != 0
    signs = bits.view(num_blocks, block).float().mul_(2).sub_(1)
    return signs.mul_(scales.contiguous().view(torch.float32).unsqueeze(-1))


def _bit_values(device: torch.device) -> Tensor:
    return 2 ** torch.arange(BITS, device=device, dtype=torch.uint8)


Shape = tuple[int, ...]


class FeedbackTensors:
    """One fp32 tensor by name, in one flat buffer, and what the step in progress would make of them."""

    def __init__(self, shapes: Mapping[str, Shape], device: torch.device) -> None:
        self.shapes = dict(shapes)
        self._sizes = [prod(shape) for shape in self.shapes.values()]
        self._flat = torch.zeros(sum(self._sizes), device=device)
        self.accepted = self._views(self._flat)
        self._next: Tensor | None = None
        self._next_views: dict[str, Tensor] = {}

    def propose(self, name: str) -> Tensor:
        """Return the tensor to write the value after this step to."""
        if self._next is None:
            self._next = self._flat.clone()  # a tensor that this step does not write stays as it is
            self._next_views = self._views(self._next)
        return self._next_views[name]

    def settle(self, refused: Tensor) -> None:
        """Take over what the step has proposed, unless it was refused (not 0) or is not finite. Never waits.

        A NaN or Inf would never go away, and the gradient of a refused step must not reach the weights later.
        """
        if self._next is not None:
            is_bad = (refused.to(self._flat.device) != 0) | ~self._next.sum().isfinite()
            torch.where(is_bad, self._flat, self._next, out=self._flat)
        self.discard()

    def discard(self) -> None:
        """Forget what the step has proposed."""
        self._next, self._next_views = None, {}

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split(self._sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


# The names since torch 2.13, which warns about the old ones.
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
Exchange = Generator[dist.Work, None, None]
Gradients = Mapping[str, Tensor]  # flat, by the names of their parameters


@dataclass(slots=True)
class ExchangeState:
    """What exchanges share. `residual` is what this rank has not sent, `velocity` top-k's momentum.

    `factor` is PowerSGD's, the same on all ranks. All are those of an unscaled loss; gradients are multiplied by
    `loss_scale`. Random numbers depend only on `seed`, `step`, this rank and the parameter, so that a run that resumes
    draws the same.
    """

    settings: Compression
    group: dist.ProcessGroup
    rank: int
    residual: FeedbackTensors | None = None
    velocity: FeedbackTensors | None = None
    factor: FeedbackTensors | None = None
    matrix_shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of PowerSGD's parameters
    seed: int = 0
    step: int = 0
    loss_scale: float = 1.0

    @property
    def size(self) -> int:
        return self.group.size()

    def with_residual(self, name: str, gradient: Tensor) -> Tensor:
        """Return the gradient and what this rank has not sent so far, as a new tensor."""
        if self.residual is None:
            return gradient.float().clone()
        return torch.add(gradient.float(), self.residual.accepted[name].view(-1), alpha=self.loss_scale)

    def keep(self, name: str, rest: Tensor) -> None:
        """Keep what was not sent for the next step."""
        if self.residual is not None:
            torch.div(rest, self.loss_scale, out=self.residual.propose(name).view(-1))

    def noise(self, name: str, phase: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return uniform numbers in [0, 1)."""
        text = f"{self.seed}/{self.step}/{dist.get_rank()}/{phase}/{name}"
        return torch.rand(shape, generator=_generator(text, device), device=device)


def _generator(text: str, device: torch.device) -> torch.Generator:
    number = int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1
    return torch.Generator(device).manual_seed(number)


def exchange_as(state: ExchangeState, gradients: Gradients, dtype: torch.dtype = torch.float32) -> Exchange:
    """Average in fp32, or in a 16-bit dtype."""
    flat = torch.cat([each.float() for each in gradients.values()]).div_(state.size).to(dtype)  # stays in range
    yield _work(dist.all_reduce(flat, group=state.group, async_op=True))
    _copy_back(gradients, flat)


def exchange_int8(state: ExchangeState, gradients: Gradients) -> Exchange:
    """Average as int8. Each rank sums one chunk of every parameter in fp32, rounds it again and sends it to all."""
    block, ranks = state.settings.block or 1, state.size
    device = next(iter(gradients.values())).device
    widths = {name: -(-len(each) // (ranks * block)) * block for name, each in gradients.items()}
    rows, noise = (torch.zeros(ranks, sum(widths.values()), device=device) for _ in range(2))
    totals = {name: state.with_residual(name, each) for name, each in gradients.items()}
    columns = [each.split([*widths.values()], 1) for each in (rows, noise)]
    for (name, total), part, random in zip(totals.items(), *columns, strict=True):
        part.copy_(torch.nn.functional.pad(total, (0, part.numel() - len(total))).view(part.shape))
        random.copy_(state.noise(name, "send", tuple(part.shape), device))
    message = int8_message(rows.unflatten(1, (-1, block)), noise.unflatten(1, (-1, block)))
    for (name, total), part in zip(totals.items(), read_int8(message, block).split([*widths.values()], 1), strict=True):
        state.keep(name, total - part.reshape(-1)[: len(total)])
    received = torch.empty_like(message)
    yield _work(dist.all_to_all_single(received, message, group=state.group, async_op=True))
    mean = read_int8(received, block).sum(0) / ranks
    for name, random in zip(widths, noise[0].split([*widths.values()]), strict=True):
        random.copy_(state.noise(name, "sum", tuple(random.shape), device))
    message = int8_message(mean.view(-1, block), noise[0].view(-1, block))
    received = message.new_empty(ranks * len(message))
    yield _work(gather_single(received, message, group=state.group, async_op=True))
    parts = read_int8(received.view(ranks, -1), block).split([*widths.values()], 1)
    for gradient, part in zip(gradients.values(), parts, strict=True):
        gradient.copy_(part.reshape(-1)[: len(gradient)])


def exchange_signs(state: ExchangeState, gradients: Gradients) -> Exchange:
    """Average the signs of all ranks, times the mean absolute value of their blocks."""
    block = state.settings.block or 1
    totals = {name: state.with_residual(name, each) for name, each in gradients.items()}
    num_blocks = [-(-len(each) // block) for each in totals.values()]
    device = next(iter(totals.values())).device
    padded = [torch.nn.functional.pad(each, (0, -len(each) % block)).view(-1, block) for each in totals.values()]
    counts = torch.full((sum(num_blocks),), float(block), device=device)
    for total, last in zip(totals.values(), torch.tensor(num_blocks).cumsum(0).tolist(), strict=True):
        counts[last - 1] -= -len(total) % block
    message = sign_message(torch.cat(padded), counts)
    for (name, total), part in zip(totals.items(), read_signs(message, block).split(num_blocks), strict=True):
        state.keep(name, total - part.reshape(-1)[: len(total)])
    received = message.new_empty(state.size, len(message))
    yield _work(gather_single(received.view(-1), message, group=state.group, async_op=True))
    mean = torch.zeros(sum(num_blocks), block, device=device)
    for each in received:
        mean += read_signs(each, block)
    mean /= state.size
    for gradient, part in zip(gradients.values(), mean.split(num_blocks), strict=True):
        gradient.copy_(part.reshape(-1)[: len(gradient)])


def exchange_top_k(state: ExchangeState, gradients: Gradients) -> Exchange:
    """Average the largest values. Ranks choose different ones: values and indices are gathered, then added by index."""
    ratio, values, indices, first = state.settings.ratio or 1.0, list[Tensor](), list[Tensor](), 0
    for name, gradient in gradients.items():
        sent = gradient
        if state.velocity is not None and (momentum := state.settings.momentum):
            # The exponential mean of the gradients. It is not complete: `momentum / (1 - momentum)` times the last mean
            # will follow in later steps, so that all means add up to all gradients.
            mean = state.velocity.propose(name).view(-1)
            torch.lerp(gradient.float() / state.loss_scale, state.velocity.accepted[name].view(-1), momentum, out=mean)
            sent = mean * state.loss_scale
        total = state.with_residual(name, sent)
        chosen = total.abs().topk(max(1, int(ratio * len(total))), sorted=False).indices
        values.append(total[chosen])
        indices.append((chosen + first).to(torch.int32))
        state.keep(name, total.index_fill_(0, chosen, 0.0))
        first += len(total)
    message = torch.stack([torch.cat(values).view(torch.int32), torch.cat(indices)])
    received = message.new_empty(state.size, *message.shape)
    yield _work(gather_single(received.view(-1), message.view(-1), group=state.group, async_op=True))
    total = torch.zeros(first, device=message.device)
    for rank_values, rank_indices in received:
        total.index_add_(0, rank_indices.long(), rank_values.view(torch.float32))
    _copy_back(gradients, total.div_(state.size))


def exchange_factors(state: ExchangeState, gradients: Gradients) -> Exchange:
    """Average as a product of two factors of low rank (PowerSGD): one step of power iteration, from the last factor."""
    assert state.factor is not None
    matrices = {
        name: state.with_residual(name, each).view(state.matrix_shapes[name]) for name, each in gradients.items()
    }
    starts = {name: torch.linalg.qr(state.factor.accepted[name]).Q for name in matrices}
    left = {name: each @ starts[name] for name, each in matrices.items()}
    flat = torch.cat([each.view(-1) for each in left.values()])
    yield _work(dist.all_reduce(flat, group=state.group, async_op=True))
    _copy_back({name: each.view(-1) for name, each in left.items()}, flat)
    left = {name: torch.linalg.qr(each).Q for name, each in left.items()}
    right = {name: each.T @ left[name] for name, each in matrices.items()}
    for name, each in matrices.items():  # what this rank has sent is its own part of the product
        state.keep(name, (each - left[name] @ right[name].T).view(-1))
    flat = torch.cat([each.reshape(-1) for each in right.values()]).div_(state.size)
    yield _work(dist.all_reduce(flat, group=state.group, async_op=True))
    for (name, each), part in zip(right.items(), flat.split([each.numel() for each in right.values()]), strict=True):
        mean = part.view(each.shape)
        state.factor.propose(name).copy_(mean)
        gradients[name].copy_((left[name] @ mean.T).view(-1))


def first_factor(name: str, shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Return the factor that a parameter starts with: random, and the same on all ranks."""
    return torch.randn(shape, generator=_generator(f"{seed}/factor/{name}", torch.device("cpu"))).to(device)


def _copy_back(gradients: Gradients, flat: Tensor) -> None:
    parts = flat.split([len(each) for each in gradients.values()])
    torch._foreach_copy_([*gradients.values()], [*parts])


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


EXCHANGES: Mapping[str, Callable[[ExchangeState, Gradients], Exchange]] = {
    "none": exchange_as,
    "fp16": partial(exchange_as, dtype=torch.float16),
    "bf16": partial(exchange_as, dtype=torch.bfloat16),
    "int8": exchange_int8,
    "1bit": exchange_signs,
    "topk": exchange_top_k,
    "powersgd": exchange_factors,
}
