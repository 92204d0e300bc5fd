"""A plain loop, as many people write it: the whole model compiled, bf16 parameters, fp32 masters in the optimizer.

Head and loss are compiled together. Gradients are clipped, copied to the fp32 masters, which fused AdamW updates, and
the bf16 parameters are copies of these. With several micro-batches gradients are summed in bf16. With several ranks it
is DistributedDataParallel. Batches are drawn beforehand and copied from pinned memory.
"""

import os
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.peers.timer import Timer
from benchmarks.peers.work import BETAS, CLIP, LR, SEED, THETA, WEIGHT_DECAY, Shape, Work, draw_batches
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

NUM_BATCHES = 16  # different micro-batches


class PlainBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.heads + 2 * shape.kv_heads
        self.before_attention, self.before_ffn = (nn.RMSNorm(shape.hidden, eps=1e-5) for _ in range(2))
        self.qkv = nn.Linear(shape.hidden, heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, stream: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, seq_len, _ = stream.shape
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        joint = self.qkv(self.before_attention(stream)).view(rows, seq_len, -1, self.shape.head_dim)
        q, k, v = joint.split([heads, kv_heads, kv_heads], 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        seen = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=heads > kv_heads
        )
        stream = stream + self.out(seen.transpose(1, 2).reshape(rows, seq_len, -1))
        gate, up = self.gate_up(self.before_ffn(stream)).chunk(2, -1)
        return stream + self.down(F.silu(gate) * up)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class PlainDecoder(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        shape = work.model
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        half = shape.head_dim // 2
        angles = torch.outer(torch.arange(work.seq_len).float(), THETA ** -(torch.arange(half).float() / half))
        self.register_buffer("cos", angles.cos()[:, None, :])
        self.register_buffer("sin", angles.sin()[:, None, :])

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        cos, sin = self.cos.to(stream.dtype), self.sin.to(stream.dtype)
        for block in self.blocks:
            stream = block(stream, cos, sin)
        return self.norm(stream)


class PlainModel(nn.Module):
    """The decoder and its head; returns the mean loss."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.decoder = PlainDecoder(work)
        self.head = nn.Linear(work.model.hidden, work.model.vocab, bias=False)
        for each in self.parameters():
            if each.ndim > 1:
                nn.init.normal_(each, std=0.02)
        self.loss_of = self.loss

    def compile_parts(self) -> None:
        self.decoder.compile()
        self.loss_of = torch.compile(self.loss)

    def loss(self, stream: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(stream).flatten(0, 1).float(), labels.flatten())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss_of(self.decoder(tokens), labels)


class MasterWeights:
    """Fused AdamW over fp32 copies of bf16 parameters; over the parameters themselves where they are fp32."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        half = parameters[0].dtype != torch.float32
        self.masters = [each.detach().float().clone() for each in parameters] if half else []
        self.optimizer = torch.optim.AdamW(
            self.masters or parameters, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, CLIP, foreach=True)
        for master, each in zip(self.masters, self.parameters, strict=False):
            master.grad = each.grad.float() if master.grad is None else master.grad.copy_(each.grad)
        self.optimizer.step()
        if self.masters:
            torch._foreach_copy_([each.data for each in self.parameters], self.masters)
        for each in self.parameters:
            each.grad = None


def ready(work: Work) -> Callable[[Timer], dict[str, Any]]:
    return lambda timer: _train(work, timer)


def _train(work: Work, timer: Timer) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED)
    with device:
        model = PlainModel(work)
    model = model.to(torch.float32 if work.precision == "fp32" else torch.bfloat16)
    if work.compile:
        model.compile_parts()
    optimizer = MasterWeights(list(model.parameters()))
    forward: nn.Module = model
    if work.ranks > 1:
        dist.init_process_group("gloo")
        forward = DistributedDataParallel(model)
    losses, batches = [], batches_on(work, device)
    for _ in range(work.all_steps):
        parts = []
        for micro, rows in enumerate(islice(batches, work.grad_accum)):
            if work.ranks > 1:
                forward.require_backward_grad_sync = micro == work.grad_accum - 1
            loss = forward(rows[:, :-1], rows[:, 1:])
            (loss / work.grad_accum).backward()
            parts.append(loss.detach())
        optimizer.update()
        losses.append(parts)
        timer.step()
    first, last = (torch.stack(parts).mean().item() for parts in (losses[0], losses[-1]))
    return {"first_loss": first, "last_loss": last, "version": "written by hand"}


def batches_on(work: Work, device: torch.device) -> Iterator[Tensor]:
    """Yield micro-batches on the device, drawn beforehand and copied from pinned memory."""
    on_gpu = device.type == "cuda"
    drawn = islice(draw_batches(work, int(os.environ.get("RANK", 0))), NUM_BATCHES)
    ready_rows = [torch.from_numpy(rows).pin_memory() if on_gpu else torch.from_numpy(rows) for rows in drawn]
    return (rows.to(device, non_blocking=True) if on_gpu else rows for rows in cycle(ready_rows))
