"""Finds the safetensors files of a model. Other formats are refused: a pickle can run any program."""

from pathlib import Path

from trimaran.core import UserError
from trimaran.core.regular_files import check_regular_file
from trimaran.models.json_file import read_json

MAX_INDEX_BYTES = 100_000_000


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model in `folder`; an empty list if it holds no weights of any kind."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    for path in (index, single):
        if path.exists():
            check_regular_file(path, follow_links=True)  # in a Hugging Face cache every file is a link
    if index.is_file():
        return _indexed_files(index)
    if single.is_file():
        return [single]
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".pth"):
            raise UserError("M020", f"weights are not read from {path.name}, only from model.safetensors",
                            where=str(folder), fix="load it with transformers and save_pretrained it")  # fmt: skip
    return []


def _indexed_files(index: Path) -> list[Path]:
    names = read_json(index, limit_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UserError("M022", "the index lists no weights", where=str(index), fix="copy or download the file again")
    files = []
    for name in sorted({str(each) for each in names.values()}):
        path = index.parent / name
        if Path(name).name != name or not path.is_file():
            raise UserError("M022", f"the index lists '{name}', which is not a file beside it", where=str(index),
                            fix="copy or download the missing file")  # fmt: skip
        files.append(path)
    return files
