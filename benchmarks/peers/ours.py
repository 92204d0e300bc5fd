"""Trimaran: resolves, plans and trains the recipe as `trimaran train` does, with telemetry, in this process.

There is no supervisor. With the option `copies` it makes memory copies as under one. It ends before the last checkpoint
would be written: no peer saves anything either. Step times are those of `metrics.jsonl`: differences of CUDA events,
where one step ends when the next begins. `wall_seconds` is computed from the times at which its lines were written.
Where peers alternate, both are from the timer, which is called between two batches.
"""

import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from benchmarks.peers.work import CLIP, LR, SEED, WEIGHT_DECAY, VisionShape, Work
from PIL import Image

from trimaran.app.recipe.request import Request, resolve
from trimaran.core import Plan, Recipe
from trimaran.core.version import VERSION
from trimaran.data import cache_folder
from trimaran.data.text.token_shards import ShardWriter
from trimaran.data.text.tokenizer import ByteTokenizer
from trimaran.machine import detect
from trimaran.runs import create_run
from trimaran.runs.rank_environment import worker_environment

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
    write_config(work, root / "model")
    request = resolve(None, settings(work, root))
    on_cpu = request.cluster.device.kind == "cpu"
    os.environ.update(worker_environment(os.environ, request.plan, on_cpu=on_cpu, deterministic=False))
    train = trainer(copies=bool(work.options.get("copies")))
    if work.options.get("family") == "hf":
        importlib.import_module("trimaran.nets.hf.hf")  # imports transformers, before the lock is taken
    return lambda timer: _measure(train, request, folder, work, timer)


class TimedBatches:
    """The trainer's loader, which calls the timer between two batches."""

    def __init__(self, loader: Any, timer: Any, restart: Callable[[], None]) -> None:
        self._loader, self._timer, self._restart = loader, timer, restart

    def __enter__(self) -> Self:
        self._loader.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._loader.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch
            if self._timer.step():
                self._restart()  # the pause is no part of a step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


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
        f"train.global_batch={work.rows_per_step}",
        f"train.lr={LR}",
        f"train.seed={SEED}",
        f"train.clip_norm={CLIP}",
        f"train.optimizer.weight_decay={WEIGHT_DECAY}",
        "train.save=false",
        f"cluster={f'{work.ranks}xcpu' if detect().device.kind == 'cpu' else 'auto'}",
        "train.sample.tokens=0",
        "train.evaluate.batches=0",
        f"plan.micro_batch={work.micro_batch}",
        f"plan.grad_accum={work.grad_accum}",
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


def write_config(work: Work, path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(work.model.config(work.seq_len)))


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


def trainer(*, copies: bool = False) -> Callable[..., None]:
    """Return a function that trains in this process and writes no checkpoint, so the disk need not have space for one.

    torch reads the environment when it is imported, so it is imported here.
    """
    from trimaran.runs import Journal  # noqa: PLC0415
    from trimaran.train.build import build_worker_parts  # noqa: PLC0415
    from trimaran.train.checkpointing import checkpointer as checkpointing  # noqa: PLC0415
    from trimaran.train.process.rank_setup import join_process_group, read_rank_info  # noqa: PLC0415
    from trimaran.train.process.supervisor_link import SupervisorLink  # noqa: PLC0415
    from trimaran.train.rank_context import read_context  # noqa: PLC0415

    checkpointing.refuse_small_disk = lambda *_, **_options: None

    def train(path: Path, recipe: Recipe, plan: Plan, timer: Any = None) -> None:
        run = create_run(path, recipe, plan)
        rank_info = read_rank_info({})
        join_process_group(rank_info)
        link = SupervisorLink(rank_memories=(os.memfd_create("rank-memory"),) if copies else ())
        with Journal(run, 0) as journal:
            context = read_context(run, rank_info, journal, cache=cache_folder(os.environ), link=link)
            parts = build_worker_parts(context)
            trainer = parts.trainer
            if timer is not None:
                loader_from = trainer.loader_from
                trainer.loader_from = lambda start: TimedBatches(loader_from(start), timer, trainer.clock.restart)
            checkpointer = checkpointing.Checkpointer.resume(parts.checkpoint)
            ending = trainer.train(checkpointer, checkpointer.start)
            assert ending.reason == "done", f"it ended with {ending.reason}"

    return train


def _measure(
    train: Callable[..., None], request: Request, folder: tempfile.TemporaryDirectory, work: Work, timer: Any
) -> dict[str, Any]:
    alternates = hasattr(timer, "cpu_seconds")
    with folder:
        path = Path(folder.name) / "run"
        train(path, request.recipe, request.plan, timer if alternates else None)
        lines = read_metrics(path)
    result = result_of(lines, request.plan)
    return result if alternates else result | times_of(lines, work.warm)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def result_of(lines: list[dict[str, Any]], plan: Plan) -> dict[str, Any]:
    shown = plan.model_dump(mode="json", exclude_defaults=True, exclude={"prediction"})
    return {
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
        "version": f"trimaran {VERSION}",
        "note": "plan " + json.dumps(shown, sort_keys=True),
    }


def times_of(lines: list[dict[str, Any]], warm: int) -> dict[str, Any]:
    """Return the times of the steps after the first `warm` ones, as `metrics.jsonl` has them.

    A line is written while the next step runs. The last step has no next one, so its time is not used.
    """
    seconds = [line["step_seconds"] for line in lines[warm:]]
    written = lines[-2]["time"] - lines[warm - 1]["time"]
    return {
        "seconds": seconds,
        "wall_seconds": written * len(seconds) / (len(seconds) - 1),
        "first_step_time": lines[0]["time"],
    }
