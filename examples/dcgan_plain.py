"""A training script like PyTorch's DCGAN example, for one device. `dcgan.py` is the same script for any number of them.

It has two models, each with its own optimizer and learning-rate schedule. The pictures are drawn: bright squares.
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--rows", type=int, default=16)
parser.add_argument("--folder", default="out-dcgan")
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


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
net_g, net_d = Generator().to(device), Discriminator().to(device)
criterion = nn.BCELoss()
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
scheduler_d = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer_d, 100)
scheduler_g = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer_g, 100)

for step in range(args.steps):
    real, noise = (each.to(device) for each in get_batch(step))
    ones, zeros = torch.ones(len(real), device=device), torch.zeros(len(real), device=device)

    net_d.zero_grad()
    err_d_real = criterion(net_d(real), ones)
    err_d_real.backward()
    fake = net_g(noise)
    err_d_fake = criterion(net_d(fake.detach()), zeros)
    err_d_fake.backward()
    optimizer_d.step()

    net_g.zero_grad()
    err_g = criterion(net_d(fake), ones)
    err_g.backward()
    optimizer_g.step()

    scheduler_d.step()
    scheduler_g.step()
    print(f"step {step} D loss {err_d_real.item() + err_d_fake.item():.6f} G loss {err_g.item():.6f}")
torch.save({"D": net_d.state_dict(), "G": net_g.state_dict()}, args.folder + ".pt")
