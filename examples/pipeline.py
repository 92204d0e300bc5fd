"""A small transformer in two pipeline stages: torchrun --nproc-per-node=2 examples/pipeline.py."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trimaran

STEPS, ROWS, LENGTH, VOCAB, WIDTH = 20, 16, 32, 64, 64


class Model(nn.Module):
    """A transformer whose blocks stand in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(LENGTH, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def get_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens, and which were at the same place in the reversed row."""
    tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens, tokens.flip(1)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def forward(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the summed loss of some rows, and how many tokens it covers."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


loop = trimaran.prepare(model, optimizer, plan={"pp": 2, "grad_accum": 4}, forward=forward, example=get_batch(0))
for step in range(STEPS):
    result = loop.train_step(get_batch(step), clip_norm=1.0)
    if loop.is_main:
        print(f"step {step} loss {result.loss:.4f}")
