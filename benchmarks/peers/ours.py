"""Trimaran: resolves, plans and trains the recipe as `trimaran train` does, with telemetry, in this process.

There is no supervisor, so there are no memory copies, and it ends before the last checkpoint would be written: no peer
saves anything either. Step times are those of `metrics.jsonl`: differences of CUDA events, where one step ends when the
next begins. `wall_seconds` is computed from the times at which its lines were written.
"""

import importlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.work import CLIP, LR, SEED, WEIGHT_DECAY, VisionShape, Work
from PIL import Image

from trimaran import __version__
from trimaran.app.request.request import Request, resolve
from trimaran.core import Plan, Recipe
from trimaran.data import cache_folder
from trimaran.data.token_shards import ShardWriter
from trimaran.data.tokenizer import ByteTokenizer
from trimaran.hardware import detect
from trimaran.launch.local import worker_environment
from trimaran.run import create_run

MEAN_DOCUMENT = 512  # tokens of a packed document
IMAGES = 32
SPARE = 8  # tokens of a row for the markers around an image and the end of the caption


class AnyIds(ByteTokenizer):
    """A stub for a tokenizer with the shape's vocabulary; nothing is ever decoded."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.end_id = vocab_size, vocab_size - 1


def ready(work: Work) -> Callable[[Any], dict[str, Any]]:
    """Return the training function. The plan is made first, because it sets environment variables that torch reads."""
    folder = tempfile.TemporaryDirectory(prefix="throughput-")
    root = Path(folder.name)
    if work.model.vision is None:
        write_tokens(work, root / "data")
    else:
        write_images(work, root / "data", work.model.vision)
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text(json.dumps(work.model.config(work.seq_len)))
    request = resolve(None, settings(work, root))
    on_cpu = request.cluster.device.kind == "cpu"
    os.environ.update(worker_environment(os.environ, request.plan, on_cpu=on_cpu, deterministic=False))
    train = trainer()
    if work.options.get("family") == "hf":
        importlib.import_module("trimaran.nets.hf")  # imports transformers, before the lock is taken
    return lambda _: _measure(train, request, folder, work)


def settings(work: Work, root: Path) -> list[str]:
    """Return the recipe as settings. The planner chooses what the contest leaves open."""
    asked = [
        f"model.family={work.options.get('family', 'decoder')}",
        f"model.path={root / 'model'}",
        f"data.path={root / 'data'}",
        f"data.seq_len={work.seq_len}",
        f"data.isolate_documents={str(is_packed(work)).lower()}",
        "data.holdout=0",
        f"train.steps={work.all_steps}",
        f"train.global_batch={work.micro_batch}",
        f"train.lr={LR}",
        f"train.seed={SEED}",
        f"train.clip_norm={CLIP}",
        f"train.optimizer.weight_decay={WEIGHT_DECAY}",
        "train.save=false",
        f"cluster={'1xcpu' if detect().device.kind == 'cpu' else 'auto'}",
        "train.sample.tokens=0",
        "train.evaluate.batches=0",
        f"plan.micro_batch={work.micro_batch}",
        f"plan.precision={work.precision}",
        f"plan.compile={str(work.compile).lower()}",
    ]
    asked += [f"model.adapter.{name}={value}" for name, value in work.adapter.items()]
    if not work.options.get("planned"):
        asked.append(f"plan.recompute={work.recompute}")
    if work.model.vision is None:
        asked.append("data.source=shards")
    else:
        asked += [
            "data.source=image-folder",
            "data.samples.batching=pad",
            f"data.image_size={work.model.vision.pixels}",
        ]
    return [*asked, *work.options.get("set", ())]


def is_packed(work: Work) -> bool:
    return bool(work.options.get("packed"))


def write_tokens(work: Work, path: Path) -> None:
    """Write as many random tokens as the run reads: one document, or many of different lengths to be packed."""
    draw = np.random.default_rng(SEED)
    left = work.all_steps * work.tokens_per_step + 1
    with ShardWriter(path, AnyIds(work.model.vocab)) as writer:
        while left > 0:
            size = min(left, 16 + int(draw.exponential(MEAN_DOCUMENT))) if is_packed(work) else left
            writer.append(draw.integers(work.model.vocab - 1, size=size))
            writer.end_document()
            left -= size


def write_images(work: Work, path: Path, vision: VisionShape) -> None:
    """Write some images with captions that fill a row; a run repeats them."""
    draw = np.random.default_rng(SEED)
    path.mkdir()
    for number in range(IMAGES):
        coarse = Image.fromarray(draw.integers(256, size=(8, 8, 3), dtype=np.uint8))
        coarse.resize((vision.pixels, vision.pixels)).save(path / f"{number:03d}.png")
        caption = draw.integers(97, 123, size=work.seq_len - vision.tokens - SPARE, dtype=np.uint8)
        (path / f"{number:03d}.txt").write_bytes(caption.tobytes())


def trainer() -> Callable[[Path, Recipe, Plan], None]:
    """Return a function that trains in this process and writes no checkpoint, so the disk need not have space for one.

    torch reads the environment when it is imported, so it is imported here.
    """
    from trimaran.run import Journal  # noqa: PLC0415
    from trimaran.train.build import build_worker_parts  # noqa: PLC0415
    from trimaran.train.checkpointing import checkpoint_backend  # noqa: PLC0415
    from trimaran.train.process.rank_info import join_process_group, read_rank_info  # noqa: PLC0415

    checkpoint_backend._refuse_small_disk = lambda *_: None

    def train(path: Path, recipe: Recipe, plan: Plan) -> None:
        run = create_run(path, recipe, plan)
        rank_info = read_rank_info({})
        join_process_group(rank_info)
        with Journal(run, 0) as journal:
            trainer = build_worker_parts(run, rank_info, journal, cache=cache_folder(os.environ)).trainer
            ending = trainer.train(trainer.checkpointer.resume())
            assert ending.reason == "done", f"it ended with {ending.reason}"

    return train


def _measure(
    train: Callable[[Path, Recipe, Plan], None], request: Request, folder: tempfile.TemporaryDirectory, work: Work
) -> dict[str, Any]:
    with folder:
        path = Path(folder.name) / "run"
        train(path, request.recipe, request.plan)
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_seconds"] for line in lines[work.warm :]]
    # A line is written while the next step runs. The last step has no next one, so its time is not used.
    written = lines[-2]["time"] - lines[work.warm - 1]["time"]
    result = {
        "seconds": seconds,
        "wall_seconds": written * len(seconds) / (len(seconds) - 1),
        "first_step_time": lines[0]["time"],
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
        "version": f"trimaran {__version__}",
    }
    plan = request.plan.model_dump(mode="json", exclude_defaults=True, exclude={"prediction"})
    return result | {"note": "plan " + json.dumps(plan, sort_keys=True)}
