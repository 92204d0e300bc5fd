"""The script of `dcgan_plain.py` for any number of devices: `torchrun --nproc-per-node 2 dcgan.py`.

Two loops share the batches and the checkpoints. BatchNorm uses the statistics of all ranks.
"""

import argparse

import torch
from torch import nn

import trimaran

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--rows", type=int, default=16)
parser.add_argument("--folder", default="out-dcgan")
parser.add_argument("--sharding", default="none")
args = parser.parse_args()
NZ, WIDTH = 8, 8


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NZ, 2 * WIDTH, 4, 1, 0, bias=False),
            nn.BatchNorm2d(2 * WIDTH),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, WIDTH, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * WIDTH),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * WIDTH, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, picture):
        return self.main(picture).view(-1)


def get_batch(step):
    """Return pictures and noise of a step."""
    draw = torch.Generator().manual_seed(step)
    real = 0.1 * torch.randn(args.rows, 1, 16, 16, generator=draw) - 0.8
    for picture, (x, y) in zip(real, torch.randint(8, (args.rows, 2), generator=draw).tolist(), strict=True):
        picture[0, y : y + 8, x : x + 8] += 1.6
    return real, torch.randn(args.rows, NZ, 1, 1, generator=draw)


torch.manual_seed(0)
net_g, net_d = Generator(), Discriminator()
criterion = nn.BCELoss()
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
scheduler_d = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer_d, 100)
scheduler_g = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer_g, 100)
loop_d = trimaran.prepare(net_d, optimizer_d, sharding=args.sharding, batch_norm="sync")
loop_g = loop_d.prepare(net_g, optimizer_g, sharding=args.sharding, batch_norm="sync")

for step in range(loop_d.resume(args.folder, scheduler_d=scheduler_d, scheduler_g=scheduler_g), args.steps):
    real, noise = loop_d.local_rows(get_batch(step))
    ones, zeros = torch.ones(len(real), device=loop_d.device), torch.zeros(len(real), device=loop_d.device)

    net_d.zero_grad()
    err_d_real = criterion(net_d(real), ones)
    fake = net_g(noise)
    err_d_fake = criterion(net_d(fake.detach()), zeros)
    loop_d.backward(err_d_real + err_d_fake, num_samples=len(real), reduction="mean")
    result_d = loop_d.step()

    err_g = criterion(net_d(fake), ones)
    loop_g.backward(err_g, num_samples=len(real), reduction="mean")
    result_g = loop_g.step()

    scheduler_d.step()
    scheduler_g.step()
    if loop_d.is_main:
        print(f"step {step} D loss {result_d.loss.item():.6f} G loss {result_g.loss.item():.6f}")
    if (step + 1) % 5 == 0:
        loop_d.save(args.folder, step + 1, scheduler_d=scheduler_d, scheduler_g=scheduler_g)
weights = {"D": loop_d.state_dict(), "G": loop_g.state_dict()}
if loop_d.is_main:
    torch.save(weights, args.folder + ".pt")
