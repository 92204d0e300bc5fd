"""Trained weights as a Hugging Face folder: complete, or not there at all."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trimaran.core import UserError
from trimaran.models import read_json
from trimaran.nets import Network
from trimaran.parallel.axes.pp import StageMap

MAX_FILE_BYTES = 4 << 30
MAX_CONFIG_BYTES = 10_000_000
LABEL_BYTES = 4096
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)


def save_network(
    networks: Sequence[Network],
    folder: Path,
    *,
    rank: int,
    stages: StageMap,
    origin: Path | None,
    beside: Callable[[Path], None],
) -> None:
    """Write the network to `folder` as safetensors with its config.json. Every rank calls it, rank 0 writes.

    `networks` are the stages of it that this rank holds, `stages` says who holds the others. One parameter is gathered
    at a time, so rank 0 holds at most one file's worth. `beside` adds what else belongs into the folder, which appears
    whole or not at all; that of an earlier end of the run goes. What the model in `origin`, which this one was trained
    from, knows of its tokens comes along.
    """
    tensors = _all_tensors(networks, stages, rank)
    if rank != 0:
        for _ in tensors:
            pass
        return
    try:
        config = networks[0].disk_config()
        write_hf_folder(folder, config, tensors, origin=origin, beside=beside, replace=True)
    except (OSError, SafetensorError) as error:
        fix = "make room, then write them from the last checkpoint: trimaran resume RUN"
        raise UserError("D006", f"the trained weights cannot be written: {error}", where=str(folder), fix=fix) from None


def write_hf_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    origin: Path | None,
    beside: Callable[[Path], None],
    replace: bool = False,
) -> None:
    """Write a Hugging Face folder of these tensors, which appears whole or not at all. One file's worth is in memory.

    `origin` and `beside` are as in `save_network`. One that is there already is an error, or goes when the new one is
    complete, with `replace`. Raises OSError or SafetensorError when it cannot be written.
    """
    draft, old = (folder.with_name(f".{folder.name}.{word}") for word in ("draft", "old"))
    shutil.rmtree(draft, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        known = config | (_token_ids(origin) if origin else {})
        _write_text(draft / "config.json", json.dumps(known, indent=2) + "\n")
        _write_weights(tensors, draft)
        beside(draft)
        if origin:
            _copy_companions(origin, draft)
        for file in draft.glob("*.safetensors"):
            shutil.copymode(draft / "config.json", file)  # safetensors writes for its owner alone
        settle(draft)
        if replace and folder.is_dir():
            folder.rename(old)
        draft.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def settle(folder: Path) -> None:
    """Return when the files in `folder`, and their names, are on the disk itself."""
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _all_tensors(networks: Sequence[Network], stages: StageMap, rank: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of every stage, in order, on rank 0, and on the others what they hold. All must take all."""
    held = dict(zip(stages.here, networks, strict=True))
    # Many ranks may hold a stage; those in rank 0's own pipeline send theirs to it.
    speaks = dist.get_global_rank(stages.group, 0) == 0 and rank != 0
    for stage, owner in enumerate(stages.owners):
        if stage in held:
            for name, tensor in held[stage].disk_tensors():
                if speaks:
                    _send(tensor, {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype)})
                yield name, tensor
            if speaks:
                dist.send(_label({}), dst=0)
        elif rank == 0:
            yield from _received(dist.get_global_rank(stages.group, owner))


def _send(tensor: Tensor, label: dict[str, Any]) -> None:
    dist.send(_label(label), dst=0)
    dist.send(tensor, dst=0)


def _received(source: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `source` sends, up to an empty label."""
    while True:
        letter = torch.empty(LABEL_BYTES, dtype=torch.uint8)
        dist.recv(letter, src=source)
        label = json.loads(letter.numpy().tobytes().rstrip(b"\0"))
        if not label:
            return
        tensor = torch.empty(label["shape"], dtype=getattr(torch, label["dtype"].removeprefix("torch.")))
        dist.recv(tensor, src=source)
        yield label["name"], tensor


def _label(label: dict[str, Any]) -> Tensor:
    """Return the label as bytes of a fixed length. It travels as JSON: torch's object collectives would pickle it."""
    letter, text = torch.zeros(LABEL_BYTES, dtype=torch.uint8), json.dumps(label).encode()
    letter[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return letter


def _token_ids(origin: Path) -> dict[str, Any]:
    """Return which ids begin, end and pad a text, where `origin` says so; a shape knows nothing of them."""
    config = read_json(origin / "config.json", limit_bytes=MAX_CONFIG_BYTES)
    return {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}


def _copy_companions(origin: Path, folder: Path) -> None:
    for name in COMPANIONS:
        if (origin / name).is_file() and not (folder / name).exists():
            shutil.copyfile(origin / name, folder / name)


def _write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    parts: list[dict[str, int]] = []
    batch: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(batch, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append({name: each.nbytes for name, each in batch.items()})
        batch.clear()

    for name, tensor in tensors:
        if batch and sum(each.nbytes for each in batch.values()) + tensor.nbytes > MAX_FILE_BYTES:
            flush()
        batch[name] = tensor
    flush()
    if len(parts) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, part in enumerate(parts):
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(sum(part.values()) for part in parts)}, "weight_map": where}
    _write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
