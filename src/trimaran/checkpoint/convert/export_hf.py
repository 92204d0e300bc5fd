"""Writes trained weights as a Hugging Face folder, atomically: the folder appears only when it is complete."""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from filecmp import cmp
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trimaran.core import UserError
from trimaran.models import INTERNVL_CHAT, read_json
from trimaran.nets import Network, ReadTensor, full_tensor
from trimaran.parallel import StageMap, recv_json, send_json

MAX_FILE_BYTES = 4 << 30
MAX_CONFIG_BYTES = 10_000_000
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
OTHER_FILES = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
CODE_TYPES = (INTERNVL_CHAT,)  # their classes are in the folder, and not in transformers


def save_network(
    networks: Sequence[Network],
    folder: Path,
    *,
    rank: int,
    stages: StageMap,
    origin: Path | None,
    add_files: Callable[[Path], None],
    read: ReadTensor = full_tensor,
    report_progress: Callable[[], None] = lambda: None,
) -> None:
    """Write the network to `folder` as safetensors with its config.json. Every rank must call it; rank 0 writes.

    `networks` are the pipeline stages on this rank, `stages` says which rank holds the others. Parameters are gathered
    one at a time, so rank 0 holds at most one file of them. `add_files` adds other files, such as the tokenizer. An
    existing folder is replaced. `origin` is the model that training started from; its tokenizer files and token ids are
    copied. `read` is as in `Network.disk_tensors`. `report_progress` is called after each tensor, and on rank 0 after
    each file.
    """
    tensors = all_tensors(networks, stages, rank, lambda network: network.disk_tensors(read), report_progress)
    if rank != 0:
        deque(tensors, maxlen=0)
        return
    try:
        config = networks[0].disk_config()
        write_hf_folder(
            folder,
            config,
            tensors,
            origin=origin,
            add_files=add_files,
            replace=True,
            report_progress=report_progress,
        )
    except (OSError, SafetensorError) as error:
        raise UserError("D006.trained-weights", where=str(folder), error=error) from None


def write_hf_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    origin: Path | None,
    add_files: Callable[[Path], None],
    replace: bool = False,
    report_progress: Callable[[], None] = lambda: None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a Hugging Face folder of these tensors, atomically. At most one file of tensors is in memory.

    `origin` and `add_files` are as in `save_network`. An existing folder is an error; with `replace` it is removed when
    the new one is complete. Raises OSError or SafetensorError if the folder cannot be written.
    """

    def fill(draft: Path) -> None:
        merged, kind = config, config.get("model_type")
        if origin:
            try:  # a model with its own code keeps the fields that only its own config has
                before = read_json(origin / "config.json", limit_bytes=MAX_CONFIG_BYTES) if kind in CODE_TYPES else {}
            except UserError:  # it was moved after the start
                before = {}
            merged = _merged(before, config) if before.get("model_type") == kind else {**config}
            theirs = read_json(origin / "config.json", limit_bytes=MAX_CONFIG_BYTES)
            # A model spec does not have the begin, end and padding token ids.
            merged |= {key: theirs[key] for key in TOKEN_IDS if theirs.get(key) is not None}
        (draft / "config.json").write_text(json.dumps(merged, indent=2) + "\n", encoding="utf-8")
        _write_weights(tensors, draft, report_progress, max_file_bytes)
        add_files(draft)
        if origin:
            copy_tokenizer_files(origin, draft)
            if merged.get("model_type") in CODE_TYPES and "auto_map" in merged:  # its Python files, which are not run
                for file in sorted(origin.glob("*.py")):
                    shutil.copyfile(file, draft / file.name)

    write_folder(folder, fill, replace=replace, report_progress=report_progress)


def write_folder(
    folder: Path,
    fill: Callable[[Path], None],
    *,
    replace: bool = False,
    report_progress: Callable[[], None] = lambda: None,
) -> None:
    """Make a folder that `fill` writes the files of, atomically. See `write_hf_folder`."""
    draft, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("draft", "old"))
    shutil.rmtree(draft, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        fill(draft)
        for file in draft.glob("*.safetensors"):
            shutil.copymode(next(draft.glob("*config.json")), file)  # safetensors makes them for the owner only
        sync_folder(draft, report_progress)
        if replace and folder.is_dir():
            folder.rename(old)
        draft.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path, report_progress: Callable[[], None] = lambda: None) -> None:
    """Return when the files in `folder`, and their names, are durable."""
    for path in (*folder.iterdir(), folder):
        _sync(path)
        report_progress()


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def all_tensors(
    networks: Sequence[Network],
    stages: StageMap,
    rank: int,
    tensors_of: Callable[[Network], Iterable[tuple[str, Tensor]]],
    report_progress: Callable[[], None] = lambda: None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of every stage in order on rank 0, and those of its own stages on another rank.

    `tensors_of` yields the tensors of a stage, unsharded. Every rank must exhaust the iterator. `report_progress` is
    called after each tensor.
    """
    held = dict(zip(stages.here, networks, strict=True))
    # With data parallelism several ranks hold a stage; only those in the pipeline of rank 0 send theirs.
    is_sender = dist.get_global_rank(stages.group, 0) == 0 and rank != 0
    for stage, owner in enumerate(stages.owners):
        if stage in held:
            for name, tensor in tensors_of(held[stage]):
                if is_sender:
                    send_json({"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}, dst=0)
                    dist.send(tensor, dst=0)
                report_progress()
                yield name, tensor
            if is_sender:
                send_json({}, dst=0)
        elif rank == 0:
            src = dist.get_global_rank(stages.group, owner)
            while header := recv_json(src):  # an empty one ends them
                tensor = torch.empty(header["shape"], dtype=getattr(torch, header["dtype"].removeprefix("torch.")))
                dist.recv(tensor, src=src)
                report_progress()
                yield header["name"], tensor


def copy_tokenizer_files(origin: Path, folder: Path) -> None:
    """Copy files of the original model to `folder`; those of its tokenizer only if `folder` has the same one."""
    used, its_own = folder / TOKENIZER_FILE, origin / TOKENIZER_FILE
    is_own = used.is_file() and its_own.is_file() and cmp(used, its_own, shallow=False)
    for name in (*OTHER_FILES, *(TOKENIZER_FILES if is_own else ())):
        if (origin / name).is_file() and not (folder / name).exists():
            shutil.copyfile(origin / name, folder / name)


def _write_weights(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, report_progress: Callable[[], None], max_file_bytes: int
) -> None:
    parts: list[dict[str, int]] = []
    batch: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(batch, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append({name: each.nbytes for name, each in batch.items()})
        batch.clear()
        report_progress()

    for name, tensor in tensors:
        if batch and sum(each.nbytes for each in batch.values()) + tensor.nbytes > max_file_bytes:
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
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _merged(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**before}
    for name, value in after.items():
        old = before.get(name)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[name] = _merged(old, value) if both else value
    return merged
