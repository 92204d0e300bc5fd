"""Reads torch distributed checkpoints (DCP) without unpickling anything: nothing is imported, looked up or called.

A pickle is a program. Torch writes the metadata of its distributed checkpoints as a pickle, and so every tensor in
them. Here the program is only parsed: a call is recorded as a `PickledCall`, and only a few names may be called.
"""

import io
import mmap
import pickletools
import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimaran.checkpoint.shard_index import coverage_error
from trimaran.core import UserError, open_regular_file
from trimaran.parallel import DTYPE_NAMES, VALUE_BYTES, IndexEntry, TensorIndex, TensorMeta, TensorRegion

MARK = object()
LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 256 << 20
MAX_PICKLE_BYTES = 64 << 10
MAX_DIMENSIONS = 16
MAX_OPEN_FILES = 64
METADATA_MODULE = "torch.distributed.checkpoint.metadata."
OLD_METADATA_MODULE = "torch.distributed._shard.sharded_tensor.metadata."
METADATA_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
    "MEM_FORMAT_ENCODING",
)
DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
METADATA_NAMES = {
    *(module + name for module in (METADATA_MODULE, OLD_METADATA_MODULE) for name in METADATA_CLASSES),
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
UNTYPED_STORAGE = "torch.storage.UntypedStorage"
REBUILD_TENSOR, REBUILD_TYPED_TENSOR = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
TENSOR_NAMES = {REBUILD_TENSOR, REBUILD_TYPED_TENSOR, UNTYPED_STORAGE, "collections.OrderedDict", *STORAGES, *DTYPES}


@dataclass(frozen=True, slots=True)
class GlobalName:
    """The full name of a module attribute. It is never looked up."""

    text: str


@dataclass(slots=True, eq=False)
class PickledCall:
    """A recorded call of `name` with `inputs`, and the state that would be set on the result. It is never made."""

    name: str
    inputs: Any
    state: Any = None


@dataclass(slots=True, eq=False)
class PickledDict:
    """A dict as a list of pairs. Its keys are untrusted, so they are never hashed or compared."""

    pairs: list[tuple[Any, Any]]

    def string_items(self) -> dict[str, Any]:
        """Return the pairs whose keys are strings, as a dict."""
        return {key: value for key, value in self.pairs if isinstance(key, str)}


@dataclass(slots=True, eq=False)
class PersistentId:
    """A persistent id: how torch refers to a tensor storage outside of the pickle."""

    value: Any


class UnsafePickleError(Exception):
    """The pickle uses something that plain data does not need."""


def read_pickle(program: bytes, *, names: Collection[str], where: str) -> Any:
    """Return the data in the pickle `program`: numbers, strings, tuples, lists, and the classes above.

    `names` are the full names that it may refer to. Time and memory are linear in the size of the program: repeated
    references stay one object.
    """
    stack, memo = list[Any](), dict[int, Any]()
    try:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                (value,) = _pop(stack, len(stack))
                return value
            _execute(opcode.name, argument, stack, memo, names)
        raise UnsafePickleError("it does not end")
    except UnsafePickleError as error:
        raise UserError("K021.pickle-more-data", where=where, error=error) from None
    except (ValueError, IndexError, KeyError, TypeError, UnicodeError, OverflowError) as error:
        raise UserError("K022.metadata-damaged", where=where, kind=type(error).__name__) from None


def _execute(opcode: str, argument: Any, stack: list[Any], memo: dict[int, Any], names: Collection[str]) -> None:
    """Change the stack and the memo of the pickle machine as an instruction says. Frequent ones are first."""
    match opcode:
        case _ if opcode in LITERALS:
            stack.append(argument)
        case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
            memo[len(memo) if argument is None else argument] = _top(stack)
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "MARK":
            stack.append(MARK)
        case "EMPTY_DICT":
            stack.append(PickledDict([]))
        case "BUILD":
            call, state = _pop(stack, 2)
            if not isinstance(call, PickledCall) or call.state is not None:
                raise UnsafePickleError("it sets the state of something that is not a new object")
            call.state = state
            stack.append(call)
        case "REDUCE" | "NEWOBJ":
            function, inputs = _pop(stack, 2)
            if not isinstance(function, GlobalName) or not isinstance(inputs, tuple):
                raise UnsafePickleError("it calls something that is not a name")
            stack.append(PickledCall(function.text, inputs))
        case "SETITEM" | "SETITEMS":
            flat = _pop(stack, 2) if opcode == "SETITEM" else _pop_to_mark(stack)
            if not isinstance(_top(stack), PickledDict):
                raise UnsafePickleError("it sets items of something that is not a dict")
            stack[-1].pairs.extend(zip(flat[::2], flat[1::2], strict=True))
        case "NONE":
            stack.append(None)
        case "NEWTRUE" | "NEWFALSE":
            stack.append(opcode == "NEWTRUE")
        case "EMPTY_LIST":
            stack.append([])
        case "EMPTY_TUPLE":
            stack.append(())
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            stack.append(_pop(stack, int(opcode[-1])))
        case "TUPLE":
            stack.append(_pop_to_mark(stack))
        case "APPEND" | "APPENDS":
            values = _pop(stack, 1) if opcode == "APPEND" else _pop_to_mark(stack)
            if not isinstance(_top(stack), list):
                raise UnsafePickleError("it appends to something that is not a list")
            stack[-1].extend(values)
        case "GLOBAL" | "STACK_GLOBAL":
            module, name = argument.split(" ", 1) if opcode == "GLOBAL" else _pop(stack, 2)
            is_named = isinstance(module, str) and isinstance(name, str)
            full = f"{module}.{name}" if is_named else "something without a name"
            if full not in names:
                raise UnsafePickleError(f"it refers to {full[:100]!r}")
            stack.append(GlobalName(full))
        case "BINPERSID":
            stack.append(PersistentId(*_pop(stack, 1)))
        case "PROTO" | "FRAME":
            pass
        case _:
            raise UnsafePickleError(f"it uses the opcode {opcode}")


def _top(stack: list[Any]) -> Any:
    if stack[-1] is MARK:
        raise ValueError("a mark is not a value")
    return stack[-1]


def _pop(stack: list[Any], count: int) -> tuple[Any, ...]:
    taken = tuple(stack[-count:])
    if len(taken) < count or any(each is MARK for each in taken):
        raise ValueError("the stack is too short")
    del stack[-count:]
    return taken


def _pop_to_mark(stack: list[Any]) -> tuple[Any, ...]:
    position = next((index for index in reversed(range(len(stack))) if stack[index] is MARK), None)
    if position is None:
        raise ValueError("there is no mark")
    taken = tuple(stack[position + 1 :])
    del stack[position:]
    return taken


class DcpSource:
    """A DCP folder as a source of tensors, under DCP's own keys. `skipped_keys` are the keys of pickled objects.

    The constructor reads and checks the metadata; `read` checks the region that it reads. DCP has no checksum of the
    checkpoint, but each tensor has a CRC32, which is verified.
    """

    step = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress: dict[str, Any] = {}
        self._maps: dict[str, mmap.mmap] = {}
        contents = self._open(METADATA_FILE)
        if len(contents) > MAX_METADATA_BYTES:
            raise UserError("K022.metadata-too-large", where=str(folder / METADATA_FILE))
        tree = read_pickle(contents[:], names=METADATA_NAMES, where=str(folder / METADATA_FILE))
        try:
            self.index, self._lengths, self.skipped_keys = _parse_metadata(tree)
            # Does the metadata fit the files? Memory is allocated before they are read.
            num_bytes = 0
            for key, entry in self.index.items():
                if wrong := coverage_error(entry):
                    raise ValueError(f"{key}: {wrong}")
                num_bytes += prod(entry.meta.shape) * VALUE_BYTES[entry.meta.dtype]
            sizes = {file: self._path(file).stat().st_size for file in {file for file, _ in self._lengths}}
            for (file, offset), length in self._lengths.items():
                if offset + length > sizes[file]:
                    raise ValueError(f"{file} is shorter than the metadata says")
            if num_bytes > sum(sizes.values()):
                raise ValueError("the tensors are larger than the files")
        except ValueError as error:
            raise self._damaged(str(error), METADATA_FILE) from None
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise self._damaged(f"its metadata is invalid ({type(error).__name__})", METADATA_FILE) from None

    def read(self, key: str, region: TensorRegion) -> Tensor:
        """Return the values of a region, in its shape, on the CPU."""
        try:
            end = region.offset + self._lengths[region.file, region.offset]
            tensor = _read_tensor(memoryview(self._open(region.file))[region.offset : end], key)
        except (ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile, NotImplementedError) as error:
            raise self._damaged(f"{key}: {error or type(error).__name__}", region.file) from None
        if tuple(tensor.shape) != region.size or DTYPE_NAMES.get(tensor.dtype) != self.index[key].meta.dtype:
            raise self._damaged(f"{key} does not match the metadata", region.file)
        return tensor

    def _open(self, name: str) -> mmap.mmap:
        """Return a file of the folder as copy-on-write memory."""
        if name not in self._maps:
            if len(self._maps) >= MAX_OPEN_FILES:
                self._maps.pop(next(iter(self._maps)))
            with open_regular_file(self._path(name)) as file:
                self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[name]

    def _path(self, name: str) -> Path:
        """Return the path of a regular file in the folder. Raises UserError for a link or another path."""
        path = self.folder / name
        if Path(name).name != name or path.is_symlink() or not path.is_file():
            missing = name == METADATA_FILE and not path.is_symlink()
            raise UserError(
                "K020.not-dcp-checkpoint",
                where=str(self.folder),
                fix="name a folder that torch.distributed.checkpoint.save wrote"
                if missing
                else "copy the checkpoint again, with all its files and without links",
                name=name,
            )
        if not path.stat().st_size:
            raise self._damaged("the file is empty", name)
        return path

    def _damaged(self, what: str, file: str) -> UserError:
        return UserError("K022.checkpoint-damaged", where=str(self.folder / file), text=what)


def _parse_metadata(tree: Any) -> tuple[TensorIndex, dict[tuple[str, int], int], list[str]]:
    """Return the tensors, the length of each chunk on disk, and the keys of values that are not tensors."""
    fields = _fields(tree, "Metadata")
    locations: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}  # file, offset and length of each chunk
    for place, value in fields["storage_data"].pairs:
        at, storage = _fields(place, "MetadataIndex"), _fields(value, "_StorageInfo")
        if storage.get("transform_descriptors"):
            raise ValueError("it is compressed or encrypted, which is not supported")
        if at.get("offset") is not None:
            file, offset, length = storage["relative_path"], storage["offset"], storage["length"]
            if not isinstance(file, str) or not _is_count(offset) or not _is_count(length):
                raise ValueError("an invalid storage location")
            locations[_string(at["fqn"]), _sizes(at["offset"])] = file, offset, length
    index: TensorIndex = {}
    skipped_keys = []
    for key, value in fields["state_dict_metadata"].string_items().items():
        if value.name.endswith(".BytesStorageMetadata"):
            skipped_keys.append(key)
            continue
        tensor = _fields(value, "TensorStorageMetadata")
        chunks = [_fields(each, "ChunkStorageMetadata") for each in tensor["chunks"]]
        boxes = [(_sizes(each["offsets"]), _sizes(each["sizes"])) for each in chunks]
        properties = tensor["properties"].state
        is_tuple = isinstance(properties, tuple)
        dtype = DTYPES[(properties[0] if is_tuple else _fields(tensor["properties"], "TensorProperties")["dtype"]).text]
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"{key} holds {dtype}, which is not supported")
        filled = [(start, size, locations[key, start]) for start, size in boxes if prod(size)]
        regions = tuple(TensorRegion(start, size, file, offset) for start, size, (file, offset, _) in filled)
        index[key] = IndexEntry(TensorMeta(DTYPE_NAMES[dtype], _sizes(tensor["size"])), regions)
    return index, {(file, offset): length for file, offset, length in locations.values()}, skipped_keys


def _fields(call: Any, class_name: str) -> dict[str, Any]:
    """Return the fields of an instance of one of torch's classes."""
    if not isinstance(call, PickledCall) or not call.name.endswith(f".{class_name}"):
        raise ValueError(f"there is no {class_name} where one should be")
    return call.state.string_items() if isinstance(call.state, PickledDict) else {}


def _sizes(size: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size."""
    values = size.inputs[0] if isinstance(size, PickledCall) and size.name == "torch.Size" and size.inputs else size
    if isinstance(values, PickledCall) and values.name == "torch.Size":
        values = ()
    if not isinstance(values, (tuple, list)) or len(values) > MAX_DIMENSIONS or not all(map(_is_count, values)):
        raise ValueError("an invalid size")
    return tuple(values)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("an invalid name")
    return value


def _read_tensor(window: memoryview, key: str) -> Tensor:
    """Return a tensor that `torch.save` wrote, as a copy."""
    with zipfile.ZipFile(_MemoryFile(window)) as archive:
        pickle = next((each for each in archive.infolist() if each.filename.endswith("/data.pkl")), None)
        if pickle is None or pickle.file_size > MAX_PICKLE_BYTES or pickle.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it has no readable data.pkl")
        root = pickle.filename.removesuffix("data.pkl")
        if f"{root}byteorder" in archive.NameToInfo and archive.read(f"{root}byteorder") != b"little":
            raise ValueError("its byte order is not that of this machine")
        call = read_pickle(archive.read(pickle), names=TENSOR_NAMES, where=key)
        if (
            not isinstance(call, PickledCall)
            or call.name not in (REBUILD_TENSOR, REBUILD_TYPED_TENSOR)
            or not isinstance(call.inputs[0], PersistentId)
        ):
            raise ValueError("it is not a tensor")
        _, kind, name, *_ = call.inputs[0].value
        offset = call.inputs[1]
        dtype = DTYPES[call.inputs[6].text] if call.name == REBUILD_TYPED_TENSOR else STORAGES[kind.text]
        if not isinstance(kind, GlobalName) or dtype not in DTYPE_NAMES or not _is_count(offset):
            raise ValueError("its dtype is not supported")
        name, size, stride = _string(name), _sizes(call.inputs[2]), _sizes(call.inputs[3])
        entry = archive.getinfo(f"{root}data/{name}")
    header = window[entry.header_offset : entry.header_offset + 30]
    begin = entry.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    stored = window[begin : begin + entry.file_size]
    if entry.compress_type != zipfile.ZIP_STORED or bytes(header[:4]) != b"PK\3\4" or len(stored) != entry.file_size:
        raise ValueError("its values are not where the archive says")
    if zlib.crc32(stored) != entry.CRC:
        raise ValueError("its values do not match their checksum")
    width = VALUE_BYTES[DTYPE_NAMES[dtype]]
    memory = torch.empty(len(stored) // width * width, dtype=torch.uint8)
    memory.numpy()[:] = np.frombuffer(stored, dtype=np.uint8)[: len(memory)]  # which may not be aligned
    values = memory.view(dtype)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if prod(size) and last >= values.numel():
        raise ValueError("it reaches beyond its storage")
    if not prod(size):
        return torch.empty(size, dtype=dtype)
    return values.as_strided(size, stride, offset)


class _MemoryFile(io.RawIOBase):
    """A read-only file over memory, without a copy."""

    def __init__(self, memory: memoryview) -> None:
        self.memory, self.position = memory, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: len(self.memory)}[whence]
        if base + offset < 0:
            raise OSError("negative seek position")  # as a file does; zipfile relies on it to find the end
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        chunk = self.memory[self.position : self.position + len(buffer)]
        buffer[: len(chunk)] = chunk
        self.position += len(chunk)
        return len(chunk)
