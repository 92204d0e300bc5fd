"""A classifier for your own images, on any number of devices: `torchrun --nproc-per-node 2 image_classifier.py DATA`.

DATA has one folder for each class, with its images: `DATA/cat/1.jpg`, `DATA/dog/1.png`. One image in ten is held out
and measures the accuracy. Started again, the training continues from the last checkpoint.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import trimaran

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
HELD_OUT = 10  # every tenth image of a class


class ClassFolders(Dataset):
    """The images of the class folders, as tensors [3, size, size]; training images are cropped and mirrored."""

    def __init__(self, root, size, *, held_out):
        self.size, self.augments = size, not held_out
        self.classes = sorted(each.name for each in root.iterdir() if each.is_dir() and not each.name.startswith("."))
        files = {
            name: sorted(f for f in (root / name).rglob("*") if f.suffix.lower() in SUFFIXES) for name in self.classes
        }
        self.samples = [
            (file, label)
            for label, name in enumerate(self.classes)
            for number, file in enumerate(files[name])
            if (number % HELD_OUT == 0) == held_out
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        file, label = self.samples[index]
        margin = self.size // 8 if self.augments else 0
        with Image.open(file) as image:
            image = image.convert("RGB").resize((self.size + margin, self.size + margin))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
        if self.augments:
            row, column = torch.randint(margin + 1, (2,)).tolist()
            pixels = pixels[:, row : row + self.size, column : column + self.size]
            pixels = pixels.flip(2) if torch.rand(()) < 0.5 else pixels
        return pixels, label


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut. GroupNorm needs no statistics of other ranks."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 or inputs != outputs else None

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """A residual network of eight blocks, the size of ResNet-18 with `width` 64."""

    def __init__(self, num_classes, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(
                    widths[stage] if first else widths[stage + 1], widths[stage + 1], 2 if first and stage else 1
                )
                for stage in range(4)
                for first in (True, False)
            )
        )
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("data", type=Path, help="a folder with one folder for each class")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch", type=int, default=64, help="images a step, of all devices together")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--size", type=int, default=64, help="pixels a side")
parser.add_argument("--width", type=int, default=64, help="channels of the first stage, a multiple of 8")
parser.add_argument("--workers", type=int, default=2, help="processes that load images, for each device")
parser.add_argument("--out", type=Path, default=Path("out-classifier"))
args = parser.parse_args()
training, held_out = (ClassFolders(args.data, args.size, held_out=each) for each in (False, True))
if len(training.classes) < 2 or not training.samples or not held_out.samples:
    raise SystemExit(f"{args.data} needs two or more folders of images, one for each class, with some images in each")

torch.manual_seed(0)
model = ResNet(len(training.classes), args.width)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
steps = args.epochs * math.ceil(len(training) / args.batch)
warm_up = max(1, steps // 20)
scheduler = LambdaLR(optimizer, lambda step: min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / steps)))
loop = trimaran.prepare(model, optimizer)
train_loader = loop.loader(DataLoader(training, batch_size=args.batch, shuffle=True, num_workers=args.workers))
test_loader = loop.loader(DataLoader(held_out, batch_size=args.batch, num_workers=args.workers))
num_steps = loop.resume(args.out, scheduler=scheduler, loader=train_loader)


def measure(batch):
    pixels, labels = batch
    logits = model(pixels)
    return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(dim=1) == labels).sum(), len(labels)


for epoch in range(train_loader.epoch, args.epochs):
    model.train()
    for pixels, labels in train_loader:
        with torch.autocast(loop.device.type, dtype=torch.bfloat16, enabled=loop.device.type == "cuda"):
            loss = F.cross_entropy(model(pixels), labels, label_smoothing=0.1)
        loop.backward(loss, num_samples=len(labels), reduction="mean")
        result = loop.step(clip_norm=1.0)
        scheduler.step()
        num_steps += 1
    test_loss, correct, samples = loop.evaluate(measure, test_loader)
    if loop.is_main:
        print(
            f"epoch {epoch + 1} loss {result.loss.item():.4f} "
            f"held out: loss {test_loss / samples:.4f} accuracy {correct / samples:.4f}"
        )
    loop.save(args.out, num_steps, scheduler=scheduler, loader=train_loader)
weights = loop.state_dict()
if loop.is_main:
    save_file(weights, args.out / "model.safetensors")
    (args.out / "classes.json").write_text(json.dumps(training.classes))
