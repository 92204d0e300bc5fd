"""A training script like PyTorch's MNIST example, for one device. `mnist.py` is the same script for any number of them.

The digits are drawn, so that nothing has to be downloaded.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

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


def train(model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"train epoch {epoch} batch {batch_idx} loss {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.cross_entropy(output, target, reduction="sum").item()
            correct += (output.argmax(dim=1) == target).sum().item()
    samples = len(test_loader.dataset)
    print(f"test loss {test_loss / samples:.6f} accuracy {correct / samples:.4f}")


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=1001)
parser.add_argument("--random-moves", action="store_true")
parser.add_argument("--folder", default="out-mnist")
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1)
order = torch.Generator().manual_seed(2)
train_loader = DataLoader(Digits(args.samples, 3, args.random_moves), batch_size=64, shuffle=True, generator=order)
test_loader = DataLoader(Digits(101, 4), batch_size=64)
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(args.epochs):
    train(model, device, train_loader, optimizer, epoch)
    test(model, device, test_loader)
    scheduler.step()
torch.save(model.state_dict(), args.folder + ".pt")
