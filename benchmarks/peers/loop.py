"""A tuned plain loop: a decoder and a training loop as an expert writes them.

It prefers cuDNN's attention and has a bf16 residual stream, compiled blocks, head and loss compiled together, pinned
copies, a fused optimizer, and no synchronisation. Joint projections are slower here.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import torch
from benchmarks.peers.timer import Timer
from benchmarks.peers.work import BETAS, CLIP, LR, SEED, THETA, WEIGHT_DECAY, Shape, Work, draw_batches
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, stream: Tensor) -> Tensor:
        wide = stream.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * self.weight).to(stream.dtype)


class Block(nn.Module):
    def __init__(self, shape: Shape, *, recompute: bool) -> None:
        super().__init__()
        self.shape, self.recompute = shape, recompute
        kv_width = shape.kv_heads * shape.head_dim
        self.before_attention, self.before_ffn = Norm(shape.hidden), Norm(shape.hidden)
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v = nn.Linear(shape.hidden, kv_width, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, stream: Tensor, angles: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self._compute, stream, angles, use_reentrant=False)
        return self._compute(stream, angles)

    def _compute(self, stream: Tensor, angles: Tensor) -> Tensor:
        rows, seq_len, _ = stream.shape
        normed = self.before_attention(stream)
        q, k, v = (
            linear(normed).view(rows, seq_len, -1, self.shape.head_dim).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        with sdpa_kernel(KERNELS, set_priority=True):
            seen = F.scaled_dot_product_attention(
                turn(q, angles), turn(k, angles), v, is_causal=True, enable_gqa=self.shape.heads > self.shape.kv_heads
            )
        stream = stream + self.out(seen.transpose(1, 2).reshape(rows, seq_len, -1))
        normed = self.before_ffn(stream)
        return stream + self.down(F.silu(self.gate(normed)) * self.up(normed))


def turn(heads: Tensor, angles: Tensor) -> Tensor:
    """Return the heads with rotary positions: each pair (i, i + half) rotated by its angle."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = angles
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


class Decoder(nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        shape = work.model
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, recompute=work.recompute == "full") for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        half = shape.head_dim // 2
        turns = torch.outer(torch.arange(work.seq_len), THETA ** -(torch.arange(half) / half))
        self.register_buffer("angles", torch.stack([turns.cos(), turns.sin()]), persistent=False)
        for each in self.parameters():
            if each.ndim > 1:
                nn.init.normal_(each, std=0.02)

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        stream = self.embedding(tokens).to(dtype)
        for block in self.blocks:
            stream = block(stream, self.angles)
        return stream

    def loss(self, stream: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.norm(stream)).float()
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def ready(work: Work) -> Callable[[Timer], dict[str, Any]]:
    convert = _fp8_converter() if work.precision == "fp8" else None
    return lambda timer: _train(work, timer, convert)


def _train(work: Work, timer: Timer, convert: Callable[[nn.Module], nn.Module] | None) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED)
    with device:
        model = Decoder(work)
    if convert is not None:
        convert(model.blocks)
    loss_of = model.loss
    if work.compile:
        for block in model.blocks:
            block.compile(fullgraph=True)
        loss_of = torch.compile(model.loss)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    dtype = torch.float32 if work.precision == "fp32" else torch.bfloat16
    losses, batches = [], _batches(work, device)
    for _ in range(work.all_steps):
        parts = []
        for rows in islice(batches, work.grad_accum):
            with _arithmetic(device, dtype):
                loss = loss_of(model(rows[:, :-1], dtype), rows[:, 1:])
            (loss / work.grad_accum).backward()
            parts.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parts)
        timer.step()
    first, last = (torch.stack(parts).mean().item() for parts in (losses[0], losses[-1]))
    return {"first_loss": first, "last_loss": last, "version": "written by hand"}


def _arithmetic(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def _batches(work: Work, device: torch.device) -> Iterator[Tensor]:
    for rows in draw_batches(work):
        host = torch.from_numpy(rows)
        yield host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _fp8_converter() -> Callable[[nn.Module], nn.Module]:
    # torchao is an optional dependency of the fp8 contest only.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415

    return lambda blocks: convert_to_float8_training(blocks, config=Float8LinearConfig())
