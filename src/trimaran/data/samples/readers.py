"""Reads the samples of a source. A bad sample is reported and skipped, not raised."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimaran.data import drawn_shapes, lazy_import
from trimaran.data.csv_rows import csv_rows
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples.parse_chat import ImageFinder, without_arrow_nulls
from trimaran.data.samples.raw_sample import ImageLocation, RawSample, SourceFiles, Turn
from trimaran.data.samples.read_rows import FractionAt, files_with_progress, json_rows, parse_json, sample_of, text_of
from trimaran.data.samples.webdataset import read_tar
from trimaran.data.text.source_files import CSV_SUFFIXES, JSON_SUFFIXES, NOT_ROWS, data_suffix, is_saved_dataset

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
CAPTION_FILES = ("metadata.jsonl", "captions.jsonl")

RowsOf = Callable[[Path, FractionAt], Iterator[tuple[int, Any, float]]]
"""Yields number, row and fraction read of each row of a file."""


def read_samples(source_files: SourceFiles) -> Iterator[RawSample]:
    """Yield the samples of a source. A bad sample carries its reason; nothing is raised for it."""
    return READERS[source_files.source.source](source_files)


def _finder(source_files: SourceFiles, folder: Path) -> ImageFinder:
    """Return how images and videos are found that a file in `folder` names."""
    return ImageFinder(os.path.abspath(source_files.images or folder), source_files.frames)


def file_rows(file: Path, fraction_at: FractionAt) -> Iterator[tuple[int, Any, float]]:
    """Yield number, row and fraction read of each row of a JSON, Parquet or CSV file."""
    suffix = data_suffix(file)
    if suffix == ".parquet":
        return parquet_rows(file, fraction_at)
    return csv_rows(file, fraction_at) if suffix in CSV_SUFFIXES else json_rows(file, fraction_at)


def parquet_rows(file: Path, fraction_at: FractionAt) -> Iterator[tuple[int, Any, float]]:
    parquet = lazy_import.load("samples.parquet", "pyarrow", where="data.source")
    for number, row, fraction_read in parquet.read_parquet(file, fraction_at):
        yield number, without_arrow_nulls(row), fraction_read


def saved_rows(folder: Path) -> Iterator[tuple[int, Any, float]]:
    module = lazy_import.load("text.hf_datasets", "datasets", where="data.source")
    for number, row, fraction_read in module.read_saved(folder):
        yield number, without_arrow_nulls(row), fraction_read


def _read_rows(source_files: SourceFiles) -> Iterator[RawSample]:
    """Yield the rows of a `save_to_disk` folder, or of Parquet, JSON and CSV files."""
    source, folder = source_files.source, Path(source_files.source.path or "")
    if is_saved_dataset(folder):
        finder = _finder(source_files, folder)
        for number, row, fraction_read in saved_rows(folder):
            yield sample_of(folder, number, row, finder, source.text_field, fraction_read)
        return
    yield from _read_files(source_files, file_rows)


def _read_files(source_files: SourceFiles, rows_of: RowsOf) -> Iterator[RawSample]:
    for file, fraction_at in files_with_progress(source_files.files):
        finder = _finder(source_files, file.parent)
        for number, row, fraction_read in rows_of(file, fraction_at):
            yield sample_of(file, number, row, finder, source_files.source.text_field, fraction_read)


def _read_texts(source_files: SourceFiles) -> Iterator[RawSample]:
    """Yield each file as one document. Skips empty files."""
    for file, fraction_at in files_with_progress(source_files.files):
        name, fraction_read = os.path.abspath(file), fraction_at(0)
        try:
            text = text_of(file)
        except BadSampleError as error:
            yield RawSample(file=name, row=0, fraction_read=fraction_read, bad=str(error))
            continue
        if text.strip():
            yield RawSample(file=name, row=0, fraction_read=fraction_read, turns=(Turn("text", (text,)),))


def _read_image_folder(source_files: SourceFiles) -> Iterator[RawSample]:
    """Yield the images of caption lists, then the other images with the caption file of the same name."""
    listed: set[str] = set()
    for file in source_files.files:
        if file.name in CAPTION_FILES:
            finder = ImageFinder(os.path.abspath(file.parent), source_files.frames)
            for number, row, _ in json_rows(file, lambda position: 0.0):
                raw = sample_of(file, number, row, finder, source_files.source.text_field)
                listed.update(image.file for image in raw.images if isinstance(image, ImageLocation))
                yield raw
    images = [file for file in source_files.files if file.suffix.lower() in IMAGE_SUFFIXES]
    for number, file in enumerate(images, start=1):
        if (name := os.path.abspath(file)) not in listed:
            row = _caption(file, ImageLocation(name))
            yield sample_of(
                file, 0, row, ImageFinder("/dev/null"), source_files.source.text_field, number / len(images)
            )


def _caption(file: Path, image: ImageLocation) -> Any:
    """Return a row of the image and the caption file of the same name."""
    try:
        if (caption_file := file.with_suffix(".txt")).is_file():
            return {"caption": text_of(caption_file).strip(), "images": [image]}
        if not (caption_file := file.with_suffix(".json")).is_file():
            return BadSampleError("there is no caption: no .txt or .json of this name, and no list names the image")
        row = parse_json(text_of(caption_file))
    except BadSampleError as error:
        return error
    if not isinstance(row, dict):
        return row
    return {field: row[field] for field in row if field not in ("image", "images", "file_name")} | {"images": [image]}


def _read_parquet(source_files: SourceFiles) -> Iterator[RawSample]:
    return _read_files(source_files, parquet_rows)


def _read_datasets(source_files: SourceFiles) -> Iterator[RawSample]:
    """Yield the rows of a folder: of Parquet and JSON files, or of CSV files if there are no others."""
    files = [file for file in source_files.files if file.name not in NOT_ROWS]
    parquet, lines, tables = (
        [file for file in files if data_suffix(file) in suffixes]
        for suffixes in ((".parquet",), JSON_SUFFIXES, CSV_SUFFIXES)
    )
    return _read_rows(replace(source_files, files=[*parquet, *lines] or tables))


def _read_webdataset(source_files: SourceFiles) -> Iterator[RawSample]:
    for file, fraction_at in files_with_progress(source_files.files):
        yield from read_tar(file, source_files.source.text_field, fraction_at)


def _read_shapes(source_files: SourceFiles) -> Iterator[RawSample]:
    for number in range(drawn_shapes.NUM_SAMPLES):
        drawn = drawn_shapes.draw(number)
        image = (drawn.image,) if drawn.image else ()
        if drawn.question:
            turns = (Turn("user", (*[None] * len(image), drawn.question)), Turn("assistant", (drawn.answer,)))
        else:
            turns = (Turn("text", (*[None] * len(image), drawn.answer)),)
        yield RawSample(
            file="shapes", row=number + 1, fraction_read=number / drawn_shapes.NUM_SAMPLES, turns=turns, images=image
        )


READERS: dict[str, Callable[[SourceFiles], Iterator[RawSample]]] = {
    "chat": _read_rows,
    "jsonl": _read_rows,
    "text": _read_texts,
    "python-stdlib": _read_texts,
    "webdataset": _read_webdataset,
    "parquet": _read_parquet,
    "datasets": _read_datasets,
    "image-folder": _read_image_folder,
    "shapes": _read_shapes,
}
