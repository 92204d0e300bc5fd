"""A GPT like nanoGPT, trained by a plain PyTorch loop on one device. `nanogpt_trimaran.py` is its Trimaran version."""

import pathlib
import sys
import sysconfig

import torch
from torch import nn
from torch.nn import functional as F

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

for step in range(STEPS):
    x, y = get_batch(step)
    mean = 0.0
    for X, Y in zip(x.split(MICRO), y.split(MICRO), strict=True):
        loss = F.cross_entropy(model(X).view(-1, 256), Y.flatten(), ignore_index=-100, reduction="sum") / (y >= 0).sum()
        loss.backward()
        mean += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {mean:.6f}")
