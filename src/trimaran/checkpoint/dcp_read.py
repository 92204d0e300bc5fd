"""Torch's distributed checkpoints (DCP), read without unpickling anything. See `opcodes`."""

import io
import mmap
import zipfile
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trimaran.checkpoint.rank_share import DTYPE_NAMES
from trimaran.checkpoint.safe_pickle import Made, Name, Outside, Table, read_opcodes
from trimaran.checkpoint.shard_index import gap
from trimaran.checkpoint.tensor_regions import VALUE_BYTES, Entry, Index, TensorRegion, Whole
from trimaran.core import UserError

CONTENTS = ".metadata"
MAX_CONTENTS_BYTES = 256 << 20
MAX_LABEL_BYTES = 64 << 10
MAX_DIMENSIONS = 16
MAX_OPEN_FILES = 64

PLACE = "torch.distributed.checkpoint.metadata."
OLD_PLACE = "torch.distributed._shard.sharded_tensor.metadata."
NOUNS = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
         "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")  # fmt: skip
DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
NAMES_IN_CONTENTS = {
    *(place + noun for place in (PLACE, OLD_PLACE) for noun in NOUNS),
    *DTYPES,
    "torch.Size",
    "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "collections.OrderedDict",
    *(f"pathlib.{each}" for each in ("Path", "PosixPath", "_local.PosixPath", "WindowsPath", "_local.WindowsPath")),
}
STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
}
UNTYPED = "torch.storage.UntypedStorage"
TENSOR, TYPED_TENSOR = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
NAMES_IN_TENSORS = {TENSOR, TYPED_TENSOR, UNTYPED, "collections.OrderedDict", *STORAGES, *DTYPES}


class StorageLocation(NamedTuple):
    """Where in the folder something is: `length` bytes of `file` from `offset`."""

    file: str
    offset: int
    length: int


class DcpSource:
    """A DCP folder as a source of tensors, under DCP's own keys. `passed_over` are keys of pickled objects.

    Making it reads and checks the table of contents, reading a part checks that part. DCP has no checksum of the whole;
    each tensor has a CRC32, and what does not fit it is refused.
    """

    step = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress: dict[str, Any] = {}
        self._maps: dict[str, mmap.mmap] = {}
        contents = self._open(CONTENTS)
        if len(contents) > MAX_CONTENTS_BYTES:
            raise UserError("K022", "the table of contents is too large", where=str(folder / CONTENTS),
                            fix="use a checkpoint with fewer tensors")  # fmt: skip
        tree = read_opcodes(contents[:], names=NAMES_IN_CONTENTS, where=str(folder / CONTENTS))
        try:
            self.index, self._lengths, self.passed_over = _contents(tree)
            self._refuse_lies()
        except ValueError as error:
            raise self._damaged(str(error), CONTENTS) from None
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise self._damaged(f"its table of contents makes no sense ({type(error).__name__})", CONTENTS) from None

    def read(self, key: str, part: TensorRegion) -> Tensor:
        """Return the values of a part, in its shape, on the CPU."""
        try:
            tensor = _tensor(
                self._window(StorageLocation(part.file, part.offset, self._lengths[part.file, part.offset])), key
            )
        except (ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile, NotImplementedError) as error:
            raise self._damaged(f"{key}: {error or type(error).__name__}", part.file) from None
        if tuple(tensor.shape) != part.size or DTYPE_NAMES.get(tensor.dtype) != self.index[key].whole.dtype:
            raise self._damaged(f"{key} is not what the table of contents says", part.file)
        return tensor

    def _window(self, place: StorageLocation) -> memoryview:
        return memoryview(self._open(place.file))[place.offset : place.offset + place.length]

    def _open(self, name: str) -> mmap.mmap:
        """Return a file of the folder as memory. Writing to that memory would not reach the file."""
        if name not in self._maps:
            if len(self._maps) >= MAX_OPEN_FILES:
                self._maps.pop(next(iter(self._maps)))
            with self._path(name).open("rb") as file:
                self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[name]

    def _path(self, name: str) -> Path:
        """Return a file of the folder that is one, and no link to elsewhere."""
        path = self.folder / name
        if Path(name).name != name or path.is_symlink() or not path.is_file():
            missing = name == CONTENTS and not path.is_symlink()
            raise UserError("K020", f"this is no DCP checkpoint: {name} is not a file in it", where=str(self.folder),
                            fix="name a folder that torch.distributed.checkpoint.save wrote" if missing
                            else "copy the checkpoint again, with all its files and without links")  # fmt: skip
        if not path.stat().st_size:
            raise self._damaged("the file is empty", name)
        return path

    def _refuse_lies(self) -> None:
        """Raise ValueError when the contents promise what the files do not hold: memory is made before it is read."""
        promised = 0
        for key, entry in self.index.items():
            if wrong := gap(entry):
                raise ValueError(f"{key}: {wrong}")
            promised += prod(entry.whole.shape) * VALUE_BYTES[entry.whole.dtype]
        sizes = {file: self._path(file).stat().st_size for file in {file for file, _ in self._lengths}}
        for (file, offset), length in self._lengths.items():
            if offset + length > sizes[file]:
                raise ValueError(f"{file} is shorter than the table of contents says")
        if promised > sum(sizes.values()):
            raise ValueError("the tensors are larger than the files")

    def _damaged(self, what: str, file: str) -> UserError:
        return UserError("K022", f"the checkpoint is damaged: {what}", where=str(self.folder / file),
                         fix="copy the checkpoint again, or use another one")  # fmt: skip


def _contents(tree: Any) -> tuple[Index, dict[tuple[str, int], int], list[str]]:
    """Return the tensors, how long each part is on disk, and the keys of what is not a tensor."""
    fields = _fields(tree, "Metadata")
    places = dict(_places(fields["storage_data"]))
    index: Index = {}
    passed_over = []
    for key, value in fields["state_dict_metadata"].texts().items():
        if value.name.endswith(".BytesStorageMetadata"):
            passed_over.append(key)
            continue
        about = _fields(value, "TensorStorageMetadata")
        chunks = [_fields(each, "ChunkStorageMetadata") for each in about["chunks"]]
        boxes = [(_numbers(each["offsets"]), _numbers(each["sizes"])) for each in chunks]
        whole = Whole(_dtype_of(about["properties"], key), _numbers(about["size"]))
        filled = [(start, size, places[key, start]) for start, size in boxes if prod(size)]
        index[key] = Entry(
            whole, tuple(TensorRegion(start, size, place.file, place.offset) for start, size, place in filled)
        )
    return index, {(place.file, place.offset): place.length for place in places.values()}, passed_over


def _places(table: Table) -> Iterator[tuple[tuple[str, tuple[int, ...]], StorageLocation]]:
    for key, value in table.pairs:
        label, about = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
        if about.get("transform_descriptors"):
            raise ValueError("it is compressed or encrypted, which is not supported")
        if label.get("offset") is not None:
            place = StorageLocation(about["relative_path"], about["offset"], about["length"])
            if not isinstance(place.file, str) or not _is_count(place.offset) or not _is_count(place.length):
                raise ValueError("a place that is none")
            yield (_text(label["fqn"]), _numbers(label["offset"])), place


def _fields(made: Any, noun: str) -> dict[str, Any]:
    """Return the fields of one of torch's nouns."""
    if not isinstance(made, Made) or not made.name.endswith(f".{noun}"):
        raise ValueError(f"there is no {noun} where one should be")
    return made.state.texts() if isinstance(made.state, Table) else {}


def _dtype_of(properties: Made, key: str) -> str:
    state = properties.state
    name = state[0] if isinstance(state, tuple) else _fields(properties, "TensorProperties")["dtype"]
    dtype = DTYPES[name.text]
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"{key} holds {dtype}, which is not supported")
    return DTYPE_NAMES[dtype]


def _numbers(made: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    values = made.inputs[0] if isinstance(made, Made) and made.name == "torch.Size" and made.inputs else made
    if isinstance(values, Made) and values.name == "torch.Size":
        values = ()
    if not isinstance(values, (tuple, list)) or len(values) > MAX_DIMENSIONS or not all(map(_is_count, values)):
        raise ValueError("a size that is none")
    return tuple(values)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name that is none")
    return value


def _tensor(window: memoryview, key: str) -> Tensor:
    """Return a tensor that `torch.save` wrote, in memory of its own."""
    with zipfile.ZipFile(_Reel(window)) as archive:
        label = next((each for each in archive.infolist() if each.filename.endswith("/data.pkl")), None)
        if label is None or label.file_size > MAX_LABEL_BYTES or label.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it has no label that can be read")
        root = label.filename.removesuffix("data.pkl")
        if f"{root}byteorder" in archive.NameToInfo and archive.read(f"{root}byteorder") != b"little":
            raise ValueError("its bytes are in another order than this machine's")
        made = read_opcodes(archive.read(label), names=NAMES_IN_TENSORS, where=key)
        name, dtype, offset, size, stride = _described(made)
        values = _stored(window, archive.getinfo(f"{root}data/{name}"), dtype)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if prod(size) and last >= values.numel():
        raise ValueError("it reaches beyond its memory")
    if not prod(size):
        return torch.empty(size, dtype=dtype)
    return values.as_strided(size, stride, offset)


def _described(made: Any) -> tuple[str, torch.dtype, int, tuple[int, ...], tuple[int, ...]]:
    """Return the name of a tensor's memory, its dtype, and where in that memory it lies."""
    if not isinstance(made, Made) or made.name not in (TENSOR, TYPED_TENSOR) or not isinstance(made.inputs[0], Outside):
        raise ValueError("it is no tensor")
    _, kind, name, *_ = made.inputs[0].label
    dtype = DTYPES[made.inputs[6].text] if made.name == TYPED_TENSOR else STORAGES[kind.text]
    if not isinstance(kind, Name) or dtype not in DTYPE_NAMES or not _is_count(made.inputs[1]):
        raise ValueError("it is no tensor of a kind that is known")
    return _text(name), dtype, made.inputs[1], _numbers(made.inputs[2]), _numbers(made.inputs[3])


def _stored(window: memoryview, entry: zipfile.ZipInfo, dtype: torch.dtype) -> Tensor:
    """Return a file of the archive as a vector. It is copied: in the checkpoint it lies at any byte."""
    header = window[entry.header_offset : entry.header_offset + 30]
    begin = entry.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    values = window[begin : begin + entry.file_size]
    if entry.compress_type != zipfile.ZIP_STORED or bytes(header[:4]) != b"PK\3\4" or len(values) != entry.file_size:
        raise ValueError("its values are not where they should be")
    if zlib.crc32(values) != entry.CRC:
        raise ValueError("its values do not match their checksum")
    width = VALUE_BYTES[DTYPE_NAMES[dtype]]
    memory = torch.empty(len(values) // width * width, dtype=torch.uint8)
    memory.numpy()[:] = np.frombuffer(values, dtype=np.uint8)[: len(memory)]
    return memory.view(dtype)


class _Reel(io.RawIOBase):
    """Memory as a file, without a copy of it."""

    def __init__(self, memory: memoryview) -> None:
        self.memory, self.at = memory, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: len(self.memory)}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")  # as a file says it; zipfile looks for its end that way
        self.at = base + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        taken = self.memory[self.at : self.at + len(buffer)]
        buffer[: len(taken)] = taken
        self.at += len(taken)
        return len(taken)
