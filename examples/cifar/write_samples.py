"""Writes the training images as PNG files, with their classes, for recipe.yaml.

`python examples/cifar/write_samples.py`, or with `--data FOLDER` and the binary version of CIFAR-10.
"""

import argparse
import json
from pathlib import Path

from images import CLASSES, load
from PIL import Image


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="a folder with the binary version of CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar-samples"))
    args = parser.parse_args()
    (pixels, labels), _ = load(args.data)
    (args.out / "images").mkdir(parents=True, exist_ok=True)
    with (args.out / "samples.jsonl").open("w") as lines:
        for number, label in enumerate(labels):
            file = f"images/{number:05}.png"
            Image.fromarray(pixels[number]).save(args.out / file, compress_level=1)
            lines.write(json.dumps({"image": file, "question": "?", "answer": CLASSES[label]}) + "\n")
    print(f"{args.out}/samples.jsonl has {len(labels):,} images")


if __name__ == "__main__":
    main()
