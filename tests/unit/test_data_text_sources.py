"""Text sources: what they read, and the errors for bad data."""

import json
import os
from pathlib import Path

import pytest

from trimaran.core import DataSection, UserError
from trimaran.data import BadLines, check, find_files, read_chunks


def section(source: str, path: Path | None = None, **fields: object) -> DataSection:
    return DataSection.model_validate({"source": source, "path": None if path is None else str(path), **fields})


def texts(data: DataSection) -> list[str]:
    """Return the documents of the source."""
    documents = [""]
    bad = BadLines(data.samples.max_bad)
    for chunk in read_chunks(data, find_files(data), bad):
        documents[-1] += chunk.text
        if chunk.ends_document:
            documents.append("")
    assert documents.pop() == ""
    bad.refuse_too_many()
    return documents


def refusal(data: DataSection) -> UserError:
    with pytest.raises(UserError) as error:
        texts(data)
    return error.value


def test_the_standard_library_is_read_without_packages_and_tests() -> None:
    files = [file.as_posix() for file in find_files(section("python-stdlib"))]
    assert any(file.endswith("/asyncio/base_events.py") for file in files)
    assert any(file.endswith("/os.py") for file in files)
    assert files == sorted(files, key=lambda file: file.split("/"))
    for unwanted in ("/site-packages/", "/dist-packages/", "/__pycache__/", "/test/", "/tests/", "/idle_test/"):
        assert not any(unwanted in file for file in files)


def test_text_folders_are_read_recursively_in_name_order(tmp_path: Path) -> None:
    for name, text in {"b.md": "second", "a/z.txt": "first", "c": "third", ".hidden": "no", "empty.txt": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert texts(section("text", tmp_path)) == ["first", "second", "third"]


def test_a_large_file_is_read_in_chunks_of_complete_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimaran.data.text.text_sources.CHUNK_BYTES", 10)
    text = "".join(f"Zeile {number}: Rümpfe\n" for number in range(9))
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "short.txt").write_text("end")
    data = section("text", tmp_path)
    chunks = list(read_chunks(data, find_files(data), BadLines(0)))
    assert len(chunks) == 10
    assert all(chunk.text.endswith("\n") for chunk in chunks[:9])
    assert [chunk.fraction_read for chunk in chunks] == sorted(chunk.fraction_read for chunk in chunks)
    assert chunks[-1].fraction_read == 1.0
    assert texts(data) == [text, "end"]


def test_jsonl_reads_the_named_field_and_skips_empty_texts(tmp_path: Path) -> None:
    rows = [{"body": "one"}, {"body": ""}, {"body": "zwölf", "n": 1}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    (tmp_path / "b.jsonl").write_text('{"body": "last"}\n')
    (tmp_path / "readme.md").write_text("not data")
    assert texts(section("jsonl", tmp_path, text_field="body")) == ["one", "zwölf", "last"]


def test_a_missing_path_is_named_with_its_nearest_sibling(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    error = refusal(section("text", tmp_path / "corpsu" / "part" / "a.txt"))
    assert error.code == "T003"
    assert "'corpsu' does not exist" in error.what
    assert "did you mean 'corpus'?" in error.what


def test_a_path_through_a_file_or_a_broken_link_differs_from_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "file" / "part.txt", tmp_path / "link"):
        error = refusal(section("text", path))
        assert error.code == "T003"
        assert "does not exist" not in error.what


def test_a_path_that_the_source_does_not_read_is_refused(tmp_path: Path) -> None:
    assert refusal(section("python-stdlib", tmp_path)).code == "T002"


def test_a_source_that_needs_a_path_says_so() -> None:
    for source in ("text", "jsonl", "datasets"):
        assert refusal(section(source)).code == "T001"
    with pytest.raises(UserError) as error:
        check(section("shards"))
    assert error.value.code == "T001"


def test_unreadable_paths_are_user_errors(tmp_path: Path) -> None:
    assert refusal(section("text", tmp_path / ("x" * 300))).code == "T004"
    os.mkfifo(tmp_path / "pipe")
    assert refusal(section("text", tmp_path / "pipe")).code == "T004"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "secret.txt").chmod(0)
    error = refusal(section("text", tmp_path))
    assert error.code == "T004"
    assert "secret.txt" in error.where


def test_empty_files_and_folders_are_refused(tmp_path: Path) -> None:
    assert refusal(section("text", tmp_path)).code == "T005"
    (tmp_path / "a.txt").touch()
    for path in (tmp_path, tmp_path / "a.txt"):
        assert refusal(section("text", path)).code == "T005"
    (tmp_path / "a.txt").write_text("text")
    assert refusal(section("jsonl", tmp_path)).code == "T005"


@pytest.mark.parametrize(
    ("data", "column"), [(b"text\0more", 5), (b"caf\xe9 noir", 4), ("naïve".encode("utf-16"), 4), (b"half \xe2\x82", 6)]
)
def test_binary_files_are_named_with_line_and_column(tmp_path: Path, data: bytes, column: int) -> None:
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.bin").write_bytes(b"fine\n" + data)
    error = refusal(section("text", tmp_path))
    assert error.code == "T006"
    assert f"at column {column}" in error.what
    assert "2 of 3 lines are bad, and the allowed fraction is 0.01" in error.what
    assert error.where.endswith("b.bin:2")
    with pytest.raises(UserError) as found:
        check(section("text", tmp_path))
    assert found.value.code == "T006"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{broken", "T007"),
        ("[1, 2]", "T007"),
        ("[" * 100_000, "T007"),
        ('{"txt": "a"}', "T008"),
        ('{"text": 3}', "T008"),
        ('{"text": null}', "T008"),
        ('{"text": "\\ud800"}', "T008"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, code: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n\n' + line + "\n")
    error = refusal(section("jsonl", file))
    assert error.code == code
    assert error.where == f"{file}:3"
    if len(line) < 1000:
        with pytest.raises(UserError) as found:
            check(section("jsonl", file))
        assert (found.value.code, found.value.where) == (code, error.where)


def test_a_misspelt_field_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"txt": "a", "id": 1}')
    error = refusal(section("jsonl", tmp_path / "a.jsonl"))
    assert "did you mean 'txt'?" in error.what
    assert error.fix == "set data.text_field to one of txt"


def test_the_check_reads_only_the_start(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("ü".encode() * 40_000 + b"\0")
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' * 10_000 + "broken")
    check(section("text", tmp_path / "a.txt"))
    check(section("jsonl", tmp_path / "a.jsonl"))
    assert refusal(section("text", tmp_path / "a.txt")).code == "T006"
