"""Tokens of an image, data to pack, and documents that do not see each other:
python examples/course/09-vlm-data/lesson.py"""

import json
import random
from pathlib import Path

import torch
from PIL import Image

from trimaran.core import ImageRules
from trimaran.data.vision.image_grid import measure_images
from trimaran.models import PRESETS
from trimaran.nets import decoder_network, initialise

torch.set_num_threads(1)
FOLDER = Path("runs/course-09")
NATIVE = ImageRules(patch=14, merge=2, image_token=0, max_pixels=16384 * 28 * 28)  # Qwen2-VL
TILED = ImageRules(patch=14, merge=2, image_token=0, variant="tiled", tile=448, max_tiles=12)  # InternVL


def image_tokens():
    print("image       by hand  native  tiled")
    for width, height in [(224, 224), (448, 448), (1280, 720), (4000, 3000)]:
        by_hand = round(width / 28) * round(height / 28)
        native, tiled = (measure_images([[width, height]], rules).tokens[0] for rules in (NATIVE, TILED))
        print(f"{width} x {height}  {by_hand:,}  {native:,}  {tiled:,}")


def write_data():
    """Write conversations about images of many sizes; every fifth has no image. Seeded: always the same files."""
    drawn = random.Random(0)
    (FOLDER / "images").mkdir(parents=True, exist_ok=True)
    with (FOLDER / "chat.jsonl").open("w") as file:
        for number in range(120):
            answer = " ".join(["word"] * drawn.randint(1, 60))
            turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": answer}]
            sample = {"messages": turns}
            if number % 5 < 4:
                size = drawn.randrange(32, 200), drawn.randrange(32, 200)
                Image.new("RGB", size, (number, 0, 0)).save(FOLDER / "images" / f"{number}.png")
                turns[0]["content"] = "<image>What is it?"
                sample["image"] = f"images/{number}.png"
            file.write(json.dumps(sample) + "\n")
    print(f"\nwrote 120 conversations, 96 of them with an image, to {FOLDER}")


def isolation():
    """Compute two documents in one row, with and without their borders."""
    spec = PRESETS["tiny"]
    network = decoder_network(spec)
    initialise(network.module, seed=0, spec=spec)
    drawn = torch.Generator().manual_seed(0)
    first, other, second = (torch.randint(0, 256, (1, size), generator=drawn) for size in (10, 10, 6))
    row, changed = torch.cat([first, second], dim=1), torch.cat([other, second], dim=1)
    documents = torch.tensor([[0] * 10 + [1] * 6])

    def logits(tokens, **inputs):
        return network.forward({"tokens": tokens} | inputs)[0][:, -6:]

    alone = logits(second)
    print("\nthe second of two documents in a row, compared with the same document alone")
    for label, inputs in [("with borders", {"documents": documents}), ("without borders", {})]:
        difference = (logits(row, **inputs) - alone).abs().max() / alone.abs().max()
        is_same = torch.equal(logits(row, **inputs), logits(changed, **inputs))
        print(f"{label}: equal to 1e-5: {difference.item() < 1e-5}; "
              f"unchanged if the first document is another one: {is_same}")  # fmt: skip


if __name__ == "__main__":
    image_tokens()
    write_data()
    with torch.no_grad():
        isolation()
