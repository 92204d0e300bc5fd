"""From the files of a source to its samples, one after the other. A bad one is found, told, and walked past."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trimaran.data import drawn_shapes, lazy_import
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.parse_chat import RowImages
from trimaran.data.samples.raw_sample import ImageLocation, RawSample, Task, Turn
from trimaran.data.samples.read_rows import json_rows, parse_json, sample_of, text_of, weighed
from trimaran.data.samples.webdataset import read_tar
from trimaran.data.text_sources import JSON_SUFFIXES

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
CAPTION_FILES = ("metadata.jsonl", "captions.jsonl")


def read_samples(task: Task) -> Iterator[RawSample]:
    """Yield the samples of a source; nothing that is wrong with one of them is raised."""
    return READERS[task.source.source](task)


def _read_chat(task: Task) -> Iterator[RawSample]:
    for file, done in weighed(task.files):
        finder = RowImages(os.path.abspath(task.images or file.parent))
        for number, row, share in json_rows(file, done):
            yield sample_of(file, number, row, finder, task.source.text_field, share)


def _read_texts(task: Task) -> Iterator[RawSample]:
    """Yield each file as one document; empty ones are left out."""
    for file, done in weighed(task.files):
        name, share = os.path.abspath(file), done(0)
        try:
            text = text_of(file)
        except BadSampleError as error:
            yield RawSample(file=name, row=0, done=share, bad=str(error))
            continue
        if text.strip():
            yield RawSample(file=name, row=0, done=share, turns=(Turn("text", (text,)),))


def _read_image_folder(task: Task) -> Iterator[RawSample]:
    """Yield the images that a list of captions names, then the others, each with the file of its name beside it."""
    listed: set[str] = set()
    for file in task.files:
        if file.name in CAPTION_FILES:
            finder = RowImages(os.path.abspath(file.parent))
            for number, row, _ in json_rows(file, lambda place: 0.0):
                found = sample_of(file, number, row, finder, task.source.text_field)
                listed.update(image.file for image in found.images if isinstance(image, ImageLocation))
                yield found
    images = [file for file in task.files if file.suffix.lower() in IMAGE_SUFFIXES]
    for number, file in enumerate(images, start=1):
        if (name := os.path.abspath(file)) not in listed:
            row = _caption(file, ImageLocation(name))
            yield sample_of(file, 0, row, RowImages("/dev/null"), task.source.text_field, number / len(images))


def _caption(file: Path, place: ImageLocation) -> Any:
    """Return a row of the image and what the file of the same name says about it."""
    try:
        if (beside := file.with_suffix(".txt")).is_file():
            return {"caption": text_of(beside).strip(), "images": [place]}
        if not (beside := file.with_suffix(".json")).is_file():
            return BadSampleError("there is no caption: no .txt or .json of this name, and no list that names it")
        row = parse_json(text_of(beside))
    except BadSampleError as error:
        return error
    if not isinstance(row, dict):
        return row
    return {field: row[field] for field in row if field not in ("image", "images", "file_name")} | {"images": [place]}


def _read_parquet(task: Task) -> Iterator[RawSample]:
    parquet = lazy_import.load("samples.parquet", "pyarrow", where="data.source")
    for file, done in weighed(task.files):
        finder = RowImages(os.path.abspath(task.images or file.parent))
        for number, row, share in parquet.read_parquet(file, done):
            yield sample_of(file, number, row, finder, task.source.text_field, share)


def _read_datasets(task: Task) -> Iterator[RawSample]:
    """Yield the rows of a folder that `save_to_disk` wrote, or of the parquet and JSON files in it."""
    folder = Path(task.source.path or "")
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        finder = RowImages(os.path.abspath(task.images or folder))
        module = lazy_import.load("hf_datasets", "datasets", where="data.source")
        for number, row, share in module.read_saved(folder):
            yield sample_of(folder, number, row, finder, task.source.text_field, share)
        return
    yield from _read_parquet(Task(task.source, [file for file in task.files if file.suffix == ".parquet"], task.images))
    yield from _read_chat(Task(task.source, [file for file in task.files if file.suffix in JSON_SUFFIXES], task.images))


def _read_webdataset(task: Task) -> Iterator[RawSample]:
    for file, done in weighed(task.files):
        yield from read_tar(file, task.source.text_field, done)


def _read_shapes(task: Task) -> Iterator[RawSample]:
    for number in range(drawn_shapes.NUM_SAMPLES):
        drawn = drawn_shapes.draw(number)
        image = (drawn.image,) if drawn.image else ()
        if drawn.question:
            turns = (Turn("user", (*[None] * len(image), drawn.question)), Turn("assistant", (drawn.answer,)))
        else:
            turns = (Turn("text", (*[None] * len(image), drawn.answer)),)
        yield RawSample(
            file="shapes", row=number + 1, done=number / drawn_shapes.NUM_SAMPLES, turns=turns, images=image
        )


READERS: dict[str, Callable[[Task], Iterator[RawSample]]] = {
    "chat": _read_chat,
    "jsonl": _read_chat,
    "text": _read_texts,
    "python-stdlib": _read_texts,
    "webdataset": _read_webdataset,
    "parquet": _read_parquet,
    "datasets": _read_datasets,
    "image-folder": _read_image_folder,
    "shapes": _read_shapes,
}
