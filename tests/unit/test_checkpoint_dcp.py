"""DCP folders: what torch wrote is read bit for bit, and what an attacker wrote is not executed."""

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from tests.ranks import run_ranks
from trimaran.checkpoint import DcpSource, PickledDict, dcp_key, read_full_tensor, read_pickle, write_dcp
from trimaran.core import UserError
from trimaran.parallel import DTYPE_NAMES, TORCH_DTYPES, TensorMeta

CANARY = "canary"


class Attack:
    """Makes a pickle that calls a function when it is loaded."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def touch() -> Attack:
    return Attack(os.system, f"touch {CANARY}")


def refusal(program: bytes, names: set[str] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        read_pickle(program, names=names or {"torch.Size"}, where="here")
    return caught.value.code


def metadata_of(size: tuple[int, ...] = (2,), **changes: Any) -> Metadata:
    """Return the metadata of a folder with one tensor `w`, as torch writes it, with `changes`."""
    boxes = [((0,) * len(size), size)]
    fields: dict[str, Any] = {"file": "__0_0.distcp", "offset": 0, "length": 4000, "boxes": boxes} | changes
    chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(extent)) for start, extent in fields["boxes"]]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(size), chunks)
    storage = {
        MetadataIndex("w", torch.Size(start)): _StorageInfo(fields["file"], fields["offset"], fields["length"])
        for start, _ in fields["boxes"]
    }
    return Metadata({"w": tensor}, storage_data=storage)


def folder_of(path: Path, metadata: Any, data: bytes = bytes(8000)) -> Path:
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(metadata if isinstance(metadata, bytes) else pickle.dumps(metadata))
    (path / "__0_0.distcp").write_bytes(data)
    return path


def read_all(path: Path) -> None:
    source = DcpSource(path)
    for key, entry in source.index.items():
        for region in entry.regions:
            source.read(key, region)


def refused_folder(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_all(path)
    return caught.value.code


def sharded_save(folder: str) -> dict[str, Tensor]:
    """Train an FSDP model for two steps, save it with torch, and return the full tensors."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 5), nn.LayerNorm(5))
    model[1].to(torch.bfloat16)
    for each in model:
        fully_shard(each)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        sum(each.full_tensor().float().square().sum() for each in model.parameters()).backward()  # pyrefly: ignore[missing-attribute]
        optimizer.step()
        optimizer.zero_grad()
    weights, states = cast(tuple[dict[str, Any], dict[str, Any]], get_state_dict(model, optimizer))
    dcp.save({"model": weights, "optimizer": states, "step": 2}, checkpoint_id=folder)
    full = {f"model.{name}": each.full_tensor() for name, each in weights.items()}
    for name, moments in states["state"].items():
        for state, each in moments.items():
            full[f"optimizer.state.{name}.{state}"] = each.full_tensor() if hasattr(each, "full_tensor") else each
    dist.barrier()
    return {name: each.clone() for name, each in full.items()} if dist.get_rank() == 0 else {}


def test_an_fsdp_checkpoint_of_two_ranks_is_read_bit_for_bit(tmp_path: Path) -> None:
    saved = run_ranks(2, sharded_save, str(tmp_path / "dcp"))[0]
    source = DcpSource(tmp_path / "dcp")
    assert source.index.keys() == saved.keys()
    assert any(len(entry.regions) == 2 for entry in source.index.values())
    for key, tensor in saved.items():
        assert read_full_tensor(source, key).dtype == tensor.dtype
        assert torch.equal(read_full_tensor(source, key), tensor), key
    assert "step" in source.skipped_keys


def test_every_dtype_goes_to_dcp_and_back(tmp_path: Path) -> None:
    tensors = {f"model/{name}": torch.arange(6).view(2, 3).to(dtype) for name, dtype in TORCH_DTYPES.items()}
    tensors |= {"optimizer/exp_avg/a.b": torch.randn(3, 2), "optimizer/step/a.b": torch.tensor(3.0)}
    tensors |= {"model/empty": torch.empty(0, 3), "model/scalar": torch.tensor(1.5)}
    metas = {key: TensorMeta(DTYPE_NAMES[each.dtype], tuple(each.shape)) for key, each in tensors.items()}
    write_dcp(metas, tmp_path / "dcp", tensors.__getitem__)
    source = DcpSource(tmp_path / "dcp")
    assert source.index.keys() == {dcp_key(key) for key in tensors}
    for key, tensor in tensors.items():
        found = read_full_tensor(source, dcp_key(key))
        assert found.dtype == tensor.dtype
        assert torch.equal(
            found.view(torch.uint8) if found.ndim else found, tensor.view(torch.uint8) if tensor.ndim else tensor
        )


def test_torch_loads_the_dcp_that_is_written(tmp_path: Path) -> None:
    tensors = {"model/0.weight": torch.randn(3, 2), "optimizer/exp_avg/0.weight": torch.randn(3, 2)}
    metas = {key: TensorMeta("F32", (3, 2)) for key in tensors}
    write_dcp(metas, tmp_path / "dcp", tensors.__getitem__)
    state = {
        "model": {"0.weight": torch.zeros(3, 2)},
        "optimizer": {"state": {"0.weight": {"exp_avg": torch.zeros(3, 2)}}},
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(state["model"]["0.weight"], tensors["model/0.weight"])
    assert torch.equal(state["optimizer"]["state"]["0.weight"]["exp_avg"], tensors["optimizer/exp_avg/0.weight"])


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "attack",
    [
        touch(),
        Attack(eval, f"open({CANARY!r}, 'w')"),
        Attack(getattr, Attack(__import__, "os"), "system"),
        {"a": [(1, touch())]},
        {touch(): 1},
        Attack(Attack, touch()),
    ],
    ids=["system", "eval", "getattr", "nested", "key", "class"],
)
def test_a_pickle_that_calls_functions_is_not_executed(
    attack: Any, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = pickle.dumps(attack, protocol)
    assert refusal(program) == "K021"
    assert refused_folder(folder_of(tmp_path / "dcp", program)) == "K021"
    assert not Path(CANARY).exists()


@pytest.mark.parametrize(
    "program",
    [
        b"(S'touch canary'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'touch canary'\no.",  # OBJ
        b"cposix\nsystem\n(S'touch canary'\ntR.",  # GLOBAL under another module name
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
        b"\x80\x04\x8c\x05torch\x8c\x04Size\x93\x8c\x01x\x85}\x92.",  # NEWOBJ_EX
        b"Pname\n.",  # PERSID
        b"\x80\x05\x97.",  # NEXT_BUFFER
        b"\x80\x02K\x01K\x02\x85R.",  # a call of a number
        b"\x80\x02K\x01}b.",  # a state for a number
        b"\x80\x02ctorch\nSize\n}b.",  # a state for what was not called
        b"\x80\x02K\x01K\x02a.",  # appending to a number
        b"\x80\x02K\x01K\x02K\x03s.",  # an item of a number
    ],
)
def test_an_opcode_that_data_does_not_need_is_refused(
    program: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(program) == "K021"
    assert not Path(CANARY).exists()


@pytest.mark.parametrize(
    "program",
    [b"", b"\x80\x04", b"garbage", b".", b"\x80\x02K\x01K\x02.", b"\x80\x02a.", b"\x80\x02(.", b"\x80\x02h\x05.",
     b"\x80\x02t.", b"\x80\x04\x8c\xff.", b"\x80\x02X\xff\xff\xff\x7fx."],
)  # fmt: skip
def test_a_broken_pickle_is_refused(program: bytes) -> None:
    assert refusal(program) in ("K021", "K022")


def test_nested_references_take_linear_memory() -> None:
    bomb: Any = "lol"
    for _ in range(100):
        bomb = [bomb, bomb]
    assert isinstance(read_pickle(pickle.dumps(bomb), names=(), where="here"), list)
    key: Any = ("lol",)
    for _ in range(60):
        key = (key, key)  # the hash of this tuple would never end
    program = b"\x80\x04}" + pickle.dumps(key, 4)[2:][9:-1] + b"K\x01s."
    assert isinstance(read_pickle(program, names=(), where="here"), PickledDict)


def test_deep_nesting_is_read() -> None:
    depth = 50_000
    value = read_pickle(b"]" * depth + b"a" * (depth - 1) + b".", names=(), where="here")
    assert isinstance(value, list)
    del value


@pytest.mark.parametrize(
    "metadata",
    [
        metadata_of(file="../outside"),
        metadata_of(file="/etc/hostname"),
        metadata_of(file="__9_0.distcp"),
        metadata_of(offset=7000),
        metadata_of(length=-1),
        metadata_of(length=9000),
        metadata_of(size=(1 << 40,)),
        metadata_of(size=(1 << 61,)),
        metadata_of(size=(-2,)),
        metadata_of(size=(4,), boxes=[((0,), (2,))]),
        metadata_of(size=(4,), boxes=[((0,), (3,)), ((2,), (1,))]),
        metadata_of(size=(4,), boxes=[((0,), (2,)), ((3,), (2,))]),
        metadata_of(size=(4, 1), boxes=[((0,), (4,))]),
        metadata_of(size=(1,) * 20),
        {"state_dict_metadata": 1},
        [],
        None,
        Metadata({"w": 3}, storage_data={}),  # pyrefly: ignore[bad-assignment]
        Metadata({"w": TensorStorageMetadata(TensorProperties(), torch.Size([2]), [])}, storage_data={}),
    ],
)
def test_metadata_that_does_not_fit_the_files_is_refused(metadata: Any, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(bytes(8000))
    assert refused_folder(folder_of(tmp_path / "dcp", metadata)) in ("K020", "K021", "K022")


def test_metadata_that_claims_more_than_the_files_hold_allocates_nothing(tmp_path: Path) -> None:
    boxes = [((row * 1000,), (1000,)) for row in range(200)]
    metadata = metadata_of(size=(200_000,), boxes=boxes)  # every chunk claims the same bytes
    assert refused_folder(folder_of(tmp_path / "dcp", metadata)) == "K022"


def saved(tensor: Tensor | Any) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def archive(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        for name, data in files.items():
            target.writestr(f"archive/{name}", data)
    return file.getvalue()


def single(path: Path, data: bytes) -> Path:
    return folder_of(path, metadata_of(length=len(data)), data)


def test_a_tensor_as_torch_saves_it_is_read(tmp_path: Path) -> None:
    data = saved(torch.arange(6.0)[2:6:2].clone())
    source = DcpSource(single(tmp_path / "plain", data))
    assert read_full_tensor(source, "w").tolist() == [2.0, 4.0]
    strided = DcpSource(single(tmp_path / "strided", saved(torch.arange(6.0)[1::3])))
    assert read_full_tensor(strided, "w").tolist() == [1.0, 4.0]


def tensor_pickle(*, name: str = "0", offset: int = 0, stride: int = 1) -> bytes:
    """Return a handwritten pickle of a tensor of two floats: protocol 2, a persistent id, a call."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX" + struct.pack("<I", len(name)) + name.encode()
    storage += b"X\x03\x00\x00\x00cpuK\x02tQ"
    numbers = b"J" + struct.pack("<i", offset) + b"K\x02\x85J" + struct.pack("<i", stride) + b"\x85\x89"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + numbers + b"ccollections\nOrderedDict\n)RtR."


def test_the_handwritten_pickle_is_read(tmp_path: Path) -> None:
    data = archive({"data.pkl": tensor_pickle(), "data/0": struct.pack("<2f", 1.0, 2.0)})
    assert read_full_tensor(DcpSource(single(tmp_path / "dcp", data)), "w").tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "data",
    [
        saved({"a": 1}),
        saved(torch.arange(3.0)),
        saved(torch.arange(2)),
        pickle.dumps(touch()),
        archive({"data.pkl": pickle.dumps(touch()), "data/0": bytes(8)}),
        archive({"data.pkl": tensor_pickle(offset=1), "data/0": bytes(8)}),
        archive({"data.pkl": tensor_pickle(offset=-1), "data/0": bytes(8)}),
        archive({"data.pkl": tensor_pickle(stride=1 << 30), "data/0": bytes(8)}),
        archive({"data.pkl": tensor_pickle(stride=-1), "data/0": bytes(8)}),
        archive({"data.pkl": tensor_pickle(name="../../x"), "data/0": bytes(8)}),
        archive({"data.pkl": tensor_pickle(), "data/0": bytes(4)}),
        archive({"data.pkl": tensor_pickle()}),
        archive({"data.pkl": tensor_pickle(), "data/0": bytes(8), "byteorder": b"big"}),
        archive({"data.pkl": bytes(1 << 20), "data/0": bytes(8)}),
        archive({"data/0": bytes(8)}),
        b"PK\3\4" + bytes(500),
        bytes(500),
    ],
)
def test_a_file_that_is_not_a_tensor_is_refused(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused_folder(single(tmp_path / "dcp", data)) in ("K021", "K022")
    assert not Path(CANARY).exists()


def test_a_flipped_bit_in_a_tensor_is_found(tmp_path: Path) -> None:
    data = bytearray(saved(torch.tensor([1.0, 2.0])))
    position = data.index(struct.pack("<2f", 1.0, 2.0))
    data[position + 2] ^= 1
    assert refused_folder(single(tmp_path / "dcp", bytes(data))) == "K022"


def test_links_are_not_followed(tmp_path: Path) -> None:
    data = saved(torch.tensor([1.0, 2.0]))
    folder = single(tmp_path / "dcp", data)
    for name in ("__0_0.distcp", ".metadata"):
        elsewhere = tmp_path / f"elsewhere{name}"
        (folder / name).rename(elsewhere)
        (folder / name).symlink_to(elsewhere)
        assert refused_folder(folder) == "K020"


def test_a_pickled_object_next_to_the_tensors_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"w": torch.ones(2), "note": touch()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    Path(CANARY).unlink(missing_ok=True)
    source = DcpSource(tmp_path / "dcp")
    assert source.skipped_keys == ["note"]
    assert read_full_tensor(source, "w").tolist() == [1.0, 1.0]
    assert not Path(CANARY).exists()


def test_a_folder_without_metadata_is_refused(tmp_path: Path) -> None:
    assert refused_folder(tmp_path) == "K020"
    (tmp_path / ".metadata").touch()
    assert refused_folder(tmp_path) == "K022"
