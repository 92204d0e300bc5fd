"""An image classifier in a loop of one's own: `torchrun --standalone --nproc-per-node 2 examples/cifar/train.py`.

With `--data FOLDER` it trains on the binary version of CIFAR-10. Started again, it continues from its last epoch.
"""

import argparse
from pathlib import Path

import torch
from images import CLASSES, load
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trimaran


class Images(Dataset):
    """Images as tensors [3, 32, 32] from -1 to 1, and labels. Training images are moved and mirrored."""

    def __init__(self, images, *, augments):
        self.pixels, self.labels = (torch.from_numpy(each.copy()) for each in images)
        self.augments = augments

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        pixels = self.pixels[index].permute(2, 0, 1).float() / 127.5 - 1
        if self.augments:
            row, column = torch.randint(-2, 3, (2,)).tolist()
            pixels = pixels.roll((row, column), dims=(1, 2))
            pixels = pixels.flip(2) if torch.rand(()) < 0.5 else pixels
        return pixels, self.labels[index].long()


def block(inputs, outputs):
    """Halve the resolution. GroupNorm needs no statistics of other ranks."""
    conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(4, outputs), nn.ReLU())


def build(width):
    convs = [block(inputs * width or 3, outputs * width) for inputs, outputs in ((0, 1), (1, 2), (2, 4))]
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, len(CLASSES)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="a folder with the binary version of CIFAR-10")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="images a step, of all ranks together")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=16, help="channels of the first block")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar-loop"))
    args = parser.parse_args()

    training, test = load(args.data)
    torch.manual_seed(0)
    model = build(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    loop = trimaran.prepare(model, optimizer)
    loader = loop.loader(DataLoader(Images(training, augments=True), batch_size=args.batch, shuffle=True))
    test_loader = loop.loader(DataLoader(Images(test, augments=False), batch_size=256))
    num_steps = loop.resume(args.out, loader=loader)

    def measure(batch):
        pixels, labels = batch
        logits = model(pixels)
        return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(dim=1) == labels).sum(), len(labels)

    for epoch in range(loader.epoch, args.epochs):
        for pixels, labels in loader:
            loss = F.cross_entropy(model(pixels), labels)
            loop.backward(loss, num_samples=len(labels), reduction="mean")
            result = loop.step(clip_norm=1.0)
            num_steps += 1
        test_loss, correct, samples = loop.evaluate(measure, test_loader)
        if loop.is_main:
            print(
                f"epoch {epoch + 1} loss {result.loss:.3f}, test loss {test_loss / samples:.3f} "
                f"accuracy {correct / samples:.1%}"
            )
        loop.save(args.out, num_steps, loader=loader)


if __name__ == "__main__":
    main()
