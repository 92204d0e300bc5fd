"""The same GPT on any number of devices: `torchrun --nproc-per-node 2 examples/nanogpt_trimaran.py`.

To see what changed: `diff examples/nanogpt_plain.py examples/nanogpt_trimaran.py`.
"""

import pathlib
import sys
import sysconfig

import torch
from torch import nn
from torch.nn import functional as F

import trimaran

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 50
BATCH, BLOCK, WIDTH, HEADS, LAYERS, MICRO = 16, 64, 64, 4, 3, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in self.attn(self.ln_1(x)).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


text = pathlib.Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes()
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def get_batch(step):
    """Return the global batch of a step, the same on every rank: it depends only on the step."""
    starts = torch.randint(len(data) - BLOCK - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([data[start : start + BLOCK + 1] for start in starts])
    targets = rows[:, 1:].clone()
    targets[:, : BLOCK // 4][torch.arange(BATCH) % 3 == 0] = -100  # some rows start with a prompt without loss
    return rows[:, :-1], targets


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loop = trimaran.prepare(model, optimizer)

for step in range(STEPS):
    for X, Y in loop.micro_batches(get_batch(step), size=MICRO):
        loss = F.cross_entropy(model(X).view(-1, 256), Y.flatten(), ignore_index=-100, reduction="sum")
        loop.backward(loss, num_tokens=(Y >= 0).sum())
    result = loop.step(clip_norm=1.0)
    if loop.is_main:
        print(f"step {step} loss {result.loss:.6f}")
