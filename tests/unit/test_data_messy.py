"""Text with a few bad lines, compressed files and byte order marks."""

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from trimaran.app import main, text_notices
from trimaran.core import DataSection, UserError
from trimaran.data import SampleIndex, TokenShards, check, prepare, prepare_samples

LINE = b"three hulls, one boat\n"


def section(source: str, path: Path, **fields: Any) -> DataSection:
    return DataSection.model_validate({"source": source, "path": str(path), "seq_len": 8, **fields})


def shards_of(data: DataSection, cache: Path) -> TokenShards:
    return TokenShards.open(prepare(data, cache=cache))


def text_of(shards: TokenShards) -> str:
    return shards.tokenizer.decode_all(shards.tokens(0, shards.num_tokens).tolist())


def refusal(data: DataSection, cache: Path) -> UserError:
    with pytest.raises(UserError) as refused:
        prepare(data, cache=cache)
    return refused.value


@pytest.mark.parametrize(
    ("bad", "code", "reason"),
    [
        (b"{broken", "T007", "not JSON"),
        (b'{"text": "caf\xe9"}', "T006", "byte 0xe9 at column 14"),
        (b'{"body": "x"}', "T008", "no field 'text'"),
        (b'{"text": null}', "T008", "NoneType"),
    ],
)
def test_one_bad_line_of_a_thousand_is_left_out_counted_and_named(
    tmp_path: Path, bad: bytes, code: str, reason: str
) -> None:
    file = tmp_path / "a.jsonl"
    good = b'{"text": "one boat"}\n'
    file.write_bytes(good * 500 + bad + b"\n" + good * 499)
    data = section("jsonl", file)
    check(data)
    shards = shards_of(data, tmp_path / "cache")
    assert (shards.meta.num_bad, shards.meta.num_lines, shards.num_documents) == (1, 1000, 999)
    (entry,) = shards.bad
    assert (entry["where"], entry["code"]) == (f"{file}:501", code)
    assert reason in entry["reason"]
    (notice,) = text_notices(data, shards)
    assert notice.startswith(f"1 bad line was left out of 1,000, such as {file}:501: ")
    strict = section("jsonl", file, samples={"max_bad": 0})
    assert refusal(strict, tmp_path / "cache").code == "T031"  # the same data, prepared before
    error = refusal(strict, tmp_path / "other")
    assert (error.code, error.where) == (code, f"{file}:501")
    assert "set data.samples.max_bad to 0.001" in error.fix


@pytest.mark.parametrize(
    ("row", "field", "code"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "text", "T077"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "rejected", "T077"),
        ({"messages": [{"role": "user", "content": "a"}]}, "text", "T078"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "T078"),
        ({"prompt": "a", "completion": "b"}, "text", "T078"),
    ],
)
def test_rows_that_are_no_documents_are_named_for_what_they_are(
    tmp_path: Path, row: dict[str, Any], field: str, code: str
) -> None:
    import datasets  # noqa: PLC0415  it imports pandas and pyarrow

    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    datasets.Dataset.from_list([row] * 3).save_to_disk(tmp_path / "saved")
    for data in (section("jsonl", tmp_path / "a.jsonl", text_field=field),
                 section("datasets", tmp_path / "saved", text_field=field)):  # fmt: skip
        error = refusal(data, tmp_path / "cache")
        assert error.code == code
        assert "data.source to chat" in error.fix
    with pytest.raises(UserError, match=code):
        check(section("jsonl", tmp_path / "a.jsonl", text_field=field))


@pytest.mark.parametrize("kind", ["lines", "table", "saved"])
def test_a_field_may_be_inside_another(tmp_path: Path, kind: str) -> None:
    import datasets  # noqa: PLC0415  it imports pandas and pyarrow

    rows = [{"id": 1, "data": {"text": "one boat", "lang": "en"}}, {"id": 2, "data": {"text": "two", "lang": "en"}}]
    path = tmp_path / ("a.jsonl" if kind == "lines" else "a.parquet")
    if kind == "lines":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "table":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    data = section("jsonl" if kind == "lines" else "datasets", path, text_field="data.text")
    shards = shards_of(data, tmp_path / "cache")
    assert shards.num_documents == 2
    assert "one boat" in text_of(shards)
    missing = refusal(section(data.source, path, text_field="data.body"), tmp_path / "cache")
    assert (missing.code, "no field 'data.body'" in missing.what) == ("T008", True)


def test_a_column_of_a_csv_file_holds_documents(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,body\n1,"one, boat"\n2,NA\n3\n')
    data = section("datasets", tmp_path / "a.csv", text_field="body", samples={"max_bad": 0.5})
    shards = shards_of(data, tmp_path / "cache")
    assert (shards.num_documents, shards.meta.num_bad) == (2, 1)
    assert shards.bad[0]["where"] == f"{tmp_path / 'a.csv'}:4"
    assert "one, boat" in text_of(shards)
    assert "NA" in text_of(shards)


def test_the_check_before_a_start_does_not_take_the_beginning_of_a_long_line_for_a_bad_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "ü" * 100_000}, ensure_ascii=False) + "\n")
    check(section("jsonl", tmp_path / "a.jsonl"))
    (tmp_path / "a.txt").write_text("x" + "ü" * 100_000)
    check(section("text", tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " * 100_000)
    with pytest.raises(UserError, match="byte 0xe9"):
        check(section("text", tmp_path / "a.txt"))


def test_the_hint_for_a_missing_field_depends_on_how_many_lines_have_it(tmp_path: Path) -> None:
    rows = [{"text": "a b c"} if number % 20 else {"content": "x", "id": number} for number in range(400)]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    error = refusal(section("jsonl", tmp_path / "some.jsonl"), tmp_path / "cache")
    assert error.code == "T008"
    assert error.what == "there is no field 'text'; 20 of 400 lines are bad, and the allowed fraction is 0.01"
    assert error.fix.startswith("most lines have the field: correct or drop the others, or set data.samples.max_bad to")
    allowed = section("jsonl", tmp_path / "some.jsonl", samples={"max_bad": 0.05})
    assert shards_of(allowed, tmp_path / "cache").num_documents == 380
    (tmp_path / "none.jsonl").write_text("".join(json.dumps({"content": "x", "id": 1}) + "\n" for _ in range(5000)))
    error = refusal(section("jsonl", tmp_path / "none.jsonl"), tmp_path / "cache")
    assert error.fix == "set data.text_field to one of content"
    assert "1,000 of 1,000 lines" in error.what  # the rest is not read


def test_a_line_of_a_text_that_is_not_utf8_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimaran.data.text.text_sources.CHUNK_BYTES", 8000)
    file = tmp_path / "a.txt"
    file.write_bytes(LINE * 299 + b"caf\xe9\n" + LINE * 600 + b"zero\0\n" + LINE)
    shards = shards_of(section("text", file), tmp_path / "cache")
    assert text_of(shards) == LINE.decode() * 900 + "<end>"
    assert [each["where"] for each in shards.bad] == [f"{file}:300", f"{file}:901"]
    assert (shards.meta.num_bad, shards.meta.num_lines) == (2, 902)


def test_a_file_that_is_mostly_not_text_is_left_out_completely(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(LINE * 5000)
    (tmp_path / "texts" / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"plain ascii\n" + bytes(range(256)))
    shards = shards_of(section("text", tmp_path / "texts"), tmp_path / "cache")
    assert text_of(shards) == LINE.decode() * 5000 + "<end>"
    assert shards.meta.num_bad == 5  # all of its lines
    alone = refusal(section("text", tmp_path / "texts" / "logo.png"), tmp_path / "cache")
    assert (alone.code, alone.where) == ("T006", f"{tmp_path}/texts/logo.png:1")


COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_and_byte_order_marks_are_read(tmp_path: Path, suffix: str) -> None:
    mark = b"\xef\xbb\xbf"
    rows = [json.dumps({"text": f"boat {number}"}).encode() + b"\n" for number in range(50)]
    (tmp_path / f"a.jsonl{suffix}").write_bytes(COMPRESS[suffix](mark + b"".join(rows)))
    (tmp_path / f"a.txt{suffix}").write_bytes(COMPRESS[suffix](mark + LINE * 50))
    (tmp_path / "c").mkdir()
    talk = [{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]}] * 3
    (tmp_path / "c" / f"a.json{suffix}").write_bytes(COMPRESS[suffix](mark + json.dumps(talk).encode()))
    folder = shards_of(section("jsonl", tmp_path), tmp_path / "cache")  # found in the folder by its inner suffix
    assert text_of(folder).startswith("boat 0<end>boat 1<end>")
    assert text_of(shards_of(section("text", tmp_path / f"a.txt{suffix}"), tmp_path / "cache")) == (
        LINE.decode() * 50 + "<end>"
    )
    index = SampleIndex.open(prepare_samples(section("chat", tmp_path / "c"), rules=None, cache=tmp_path / "cache"))
    assert index.num_samples == 3
    document = section("text", tmp_path / f"a.txt{suffix}")
    index = SampleIndex.open(prepare_samples(document, rules=None, cache=tmp_path / "cache"))
    assert index.sample(0).tokens[:5].tolist() == list(b"three")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_truncated_compressed_file_is_named(tmp_path: Path, suffix: str) -> None:
    whole = COMPRESS[suffix](b"".join(json.dumps({"text": str(number**9)}).encode() + b"\n" for number in range(9999)))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(whole[: len(whole) // 2])
    error = refusal(section("jsonl", tmp_path / f"a.jsonl{suffix}"), tmp_path / "cache")
    assert error.code == "T004"
    assert "truncated or damaged" in error.what


def test_a_zstandard_file_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt.zst").write_bytes(COMPRESS[".zst"](LINE * 20000) + COMPRESS[".zst"](b"the end\n"))
    shards = shards_of(section("text", tmp_path / "a.txt.zst"), tmp_path / "cache")
    assert text_of(shards) == LINE.decode() * 20000 + "the end\n<end>"


def test_a_missing_zstandard_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.zst").write_bytes(COMPRESS[".zst"](LINE))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    error = refusal(section("text", tmp_path / "a.txt.zst"), tmp_path / "cache")
    assert (error.code, error.fix) == ("T013", "run: pip install zstandard")


def test_a_byte_order_mark_changes_the_fingerprint_and_nothing_else_does(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(LINE * 9)
    before = prepare(section("text", file), cache=tmp_path / "cache")
    assert prepare(section("text", file, samples={"max_bad": 0.5}), cache=tmp_path / "cache") == before
    stat = file.stat()
    file.write_bytes(b"\xef\xbb\xbf" + (LINE * 9)[3:])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert prepare(section("text", file), cache=tmp_path / "cache") != before


def test_other_splits_and_rows_without_text_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets  # noqa: PLC0415  it imports pandas and pyarrow

    monkeypatch.setenv("TRIMARAN_CACHE", str(tmp_path / "cache"))
    train = datasets.Dataset.from_dict({"text": ["one boat"] * 200 + [None]})
    test = datasets.Dataset.from_dict({"text": ["held"] * 3})
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(str(tmp_path / "saved"))
    settings = ["data.source=datasets", f"data.path={tmp_path / 'saved'}", "data.seq_len=8"]
    assert main(["data", "inspect", *(word for each in settings for word in ("--set", each)), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    split, bad = facts["notices"]
    assert split == f"{tmp_path / 'saved'}: only the split train is read; the split test is not used"
    assert bad.startswith("1 bad line was left out of 201")
    assert facts["bad"][0]["where"].endswith("saved, row 201")
    assert facts["num_documents"] == 200
