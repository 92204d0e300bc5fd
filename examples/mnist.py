"""The script of `mnist_plain.py` for any number of devices: `torchrun --nproc-per-node 2 mnist.py`.

It shows `loop.loader`, a scheduler, `loop.evaluate`, and checkpoints in the middle of an epoch.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import trimaran

STROKES = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")  # of ten digits
BARS = {
    "a": (slice(2, 4), slice(3, 11)),
    "b": (slice(2, 8), slice(9, 11)),
    "c": (slice(7, 13), slice(9, 11)),
    "d": (slice(11, 13), slice(3, 11)),
    "e": (slice(7, 13), slice(3, 5)),
    "f": (slice(2, 8), slice(3, 5)),
    "g": (slice(7, 8), slice(3, 11)),
}


class Digits(Dataset):
    """Pictures of seven-segment digits, moved a little at random each time that one is loaded."""

    def __init__(self, length, noise_seed, random_moves=False):
        self.random_moves = random_moves
        generator = torch.Generator().manual_seed(noise_seed)
        self.noise = torch.rand(length, 1, 16, 16, generator=generator)

    def __len__(self):
        return len(self.noise)

    def __getitem__(self, index):
        picture, label = torch.zeros(1, 16, 16), index % 10
        for stroke in STROKES[label]:
            picture[0, *BARS[stroke]] = 1.0
        moved = picture.roll(tuple(torch.randint(3, (2,)).tolist()), dims=(1, 2)) if self.random_moves else picture
        return moved + 0.5 * self.noise[index], label


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 16, 3, 1)
        self.fc1, self.fc2 = nn.Linear(16 * 6 * 6, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


def train(model, loop, train_loader, scheduler, epoch, num_steps):
    model.train()
    for data, target in train_loader:
        loss = F.cross_entropy(model(data), target)
        loop.backward(loss, num_samples=len(target), reduction="mean")
        result = loop.step()
        num_steps += 1
        if loop.is_main:
            print(f"train epoch {epoch} step {num_steps} loss {result.loss.item():.6f}")
        if num_steps % args.save_every == 0:
            loop.save(args.folder, num_steps, scheduler=scheduler, loader=train_loader)
        if num_steps == args.stop_at:
            raise SystemExit(0)
    return num_steps


def test(model, loop, test_loader):
    def measure(batch):
        data, target = batch
        output = model(data)
        return F.cross_entropy(output, target, reduction="sum"), (output.argmax(dim=1) == target).sum(), len(target)

    test_loss, correct, samples = loop.evaluate(measure, test_loader)
    if loop.is_main:
        print(f"test loss {test_loss / samples:.6f} accuracy {correct / samples:.4f}")


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=1001)
parser.add_argument("--random-moves", action="store_true")
parser.add_argument("--folder", default="out-mnist")
parser.add_argument("--sharding", default="none")
parser.add_argument("--save-every", type=int, default=10)
parser.add_argument("--stop-at", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(1)
order = torch.Generator().manual_seed(2)
train_loader = DataLoader(Digits(args.samples, 3, args.random_moves), batch_size=64, shuffle=True, generator=order)
test_loader = DataLoader(Digits(101, 4), batch_size=64)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
loop = trimaran.prepare(model, optimizer, sharding=args.sharding)
train_loader, test_loader = loop.loader(train_loader), loop.loader(test_loader)
num_steps = loop.resume(args.folder, scheduler=scheduler, loader=train_loader)
for epoch in range(train_loader.epoch, args.epochs):
    num_steps = train(model, loop, train_loader, scheduler, epoch, num_steps)
    test(model, loop, test_loader)
    scheduler.step()
weights = loop.state_dict()
if loop.is_main:
    torch.save(weights, args.folder + ".pt")
