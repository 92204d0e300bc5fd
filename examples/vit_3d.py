"""A vision transformer with a 3D head: `vit_3d.py --plan 8xA100-40GB`, or `torchrun --nproc-per-node 4 vit_3d.py`.

With --plan the 10B network is planned for a cluster: nothing is computed, and no GPU is needed. Without it a small
network of the same kind is trained on generated images, every rank with a shard of the weights.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import trimaran

CLASSES, BOX = 10, 10  # a box: centre x, y, z; length, width, height; sine and cosine of the heading; velocity x, y


@dataclass(frozen=True)
class Size:
    """How large the network and its images are."""

    layers: int
    width: int
    heads: int
    image: tuple[int, int]
    patch: int
    queries: int

    @property
    def patches(self) -> int:
        return self.image[0] // self.patch * (self.image[1] // self.patch)


LARGE = Size(layers=50, width=4096, heads=32, image=(512, 864), patch=16, queries=100)
SMALL = Size(layers=2, width=64, heads=4, image=(16, 32), patch=8, queries=2)


class Block(nn.Module):
    """Attention among all patches and queries, and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Vit3d(nn.Module):
    """Patches and learned queries in one sequence; each query answers with a class and a box in space."""

    def __init__(self, size: Size, *, recompute: bool = False) -> None:
        super().__init__()
        self.size, self.recompute = size, recompute
        self.patches = nn.Conv2d(3, size.width, size.patch, size.patch)
        self.positions = nn.Parameter(0.02 * torch.randn(size.patches, size.width))
        self.queries = nn.Parameter(0.02 * torch.randn(size.queries, size.width))
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm, self.hidden = nn.LayerNorm(size.width), nn.Linear(size.width, size.width)
        self.kind, self.box = nn.Linear(size.width, CLASSES + 1), nn.Linear(size.width, BOX)

    def forward(self, images: Tensor) -> Tensor:
        seen = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        x = torch.cat([seen, self.queries.expand(len(images), -1, -1)], dim=1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = F.gelu(self.hidden(self.norm(x[:, -self.size.queries :])))
        return torch.cat([self.kind(x), self.box(x)], dim=-1)


def show_plan(cluster: str, batch: int) -> None:
    """Print the best plan for the large network, its terms, and why others lost."""
    with torch.device("meta"):
        module, images = Vit3d(LARGE), torch.empty(1, 3, *LARGE.image)
    answer = trimaran.plan(module, images, cluster=cluster, global_batch=batch)
    plan = answer.ranked[0]
    found = plan.prediction
    assert found is not None
    print(f"model   {sum(each.numel() for each in module.parameters()) / 1e9:.2f}B parameters")
    print(f"plan    {plan}")
    print(f"memory  {found.device_bytes / 2**30:.1f} GiB a device, tensors {found.peak_bytes / 2**30:.1f} GiB")
    print("        " + ", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in found.memory.items()))
    print(f"step    {found.step_seconds:.2f} s: " + ", ".join(f"{name} {s:.2f} s" for name, s in found.time.items()))
    for other in answer.ranked[1:4]:
        assert other.prediction is not None
        print(f"slower  {other}: {other.prediction.step_seconds:.2f} s")
    for miss in answer.misses[:4]:
        print(f"lost    {miss.plan}: {miss.why}")


def scenes(step: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, and the class and box that each query must find in them: a grey level for every number."""
    random = torch.Generator().manual_seed(step)
    kinds = torch.randint(CLASSES + 1, (rows, SMALL.queries), generator=random)
    boxes = torch.rand(rows, SMALL.queries, BOX, generator=random)
    images = torch.zeros(rows, 3, *SMALL.image)
    stripes = SMALL.image[1] // SMALL.queries
    for query in range(SMALL.queries):  # a stripe of the image for each query
        column = slice(query * stripes, (query + 1) * stripes)
        images[:, 0, :, column] = kinds[:, query, None, None] / CLASSES
        images[:, 1, :BOX, column] = boxes[:, query, :, None]
    return images, kinds, boxes


def train(steps: int, rows: int) -> None:
    """Train the small network, sharded over the ranks of torchrun, with every block recomputed in backward."""
    torch.manual_seed(0)
    model = Vit3d(SMALL, recompute=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loop = trimaran.prepare(model, optimizer, sharding="parameters")
    for step in range(steps):
        images, kinds, boxes = loop.local_rows(scenes(step, rows))
        logits, found = model(images).split([CLASSES + 1, BOX], dim=-1)
        is_object = (kinds < CLASSES)[..., None]  # the last class is "nothing here", without a box
        loss = F.cross_entropy(logits.flatten(0, 1), kinds.flatten(), reduction="sum")
        loop.backward(loss + (is_object * (found - boxes).abs()).sum(), num_samples=len(images))
        result = loop.step(clip_norm=1.0)
        if loop.is_main and (step + 1) % 20 == 0:
            print(f"step {step + 1} loss {result.loss:.4f}")
    held = sum(each.to_local().numel() if hasattr(each, "to_local") else each.numel() for each in model.parameters())
    if loop.is_main:
        total = sum(each.numel() for each in model.parameters())
        print(f"rank 0 of {loop.world_size} holds {held:,} of {total:,} parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plan", metavar="CLUSTER", help="plan the 10B network for this cluster, and train nothing")
    parser.add_argument("--batch", type=int, default=64, help="images a step, of all ranks together")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    show_plan(args.plan, args.batch) if args.plan else train(args.steps, args.batch)
