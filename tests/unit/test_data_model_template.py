"""The model's own chat template: the same tokens as transformers, and exactly the answers are learnt."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.model_folders import MARKED, QWEN25, STYLES, hf_tokenizer, write_model_tokenizer
from trimaran.core import DataSection, ImageRules, UserError
from trimaran.data.quarantine import BadSampleError
from trimaran.data.samples import SampleIndex, prepare_samples
from trimaran.data.samples.parse_chat import ImageFinder
from trimaran.data.samples.read_rows import sample_of
from trimaran.data.samples.tokenize_chat import ChatTokenizer
from trimaran.data.tokenizer import load_tokenizer

QUESTION, ANSWER = {"role": "user", "content": "Who is there?"}, {"role": "assistant", "content": "Nobody."}
TALK = [QUESTION, ANSWER, {"role": "user", "content": "And? "}, {"role": "assistant", "content": " A thé dog.\n"}]
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]
CALL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris", "unit": None}},
}
TOOL_TALK = [
    {"role": "user", "content": "Weather in Paris?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "get_weather", "content": "21 °C"},
    {"role": "assistant", "content": "It is 21 °C."},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    for style in STYLES:
        write_model_tokenizer(root / style, style)
    return root


def tokenize(folder: Path, row: dict[str, Any], rules: ImageRules | None = None) -> Any:
    """Return the samples of one row of chat data, or why it is bad."""
    chat = ChatTokenizer(load_tokenizer(str(folder)), "model", rules, 4096)
    return chat.tokenize([sample_of("x.jsonl", 1, row, ImageFinder("/"), "text")])[0]


def learnt(folder: Path, sample: Any) -> list[str]:
    """Return the runs of tokens that are learnt, as text."""
    tokenizer = hf_tokenizer(folder)
    runs = np.split(np.arange(len(sample.tokens)), np.flatnonzero(np.diff(sample.targets)) + 1)
    return ["".join(tokenizer.convert_ids_to_tokens(sample.tokens[run].tolist())).replace("Ġ", " ").replace("▁", " ")
            .replace("Ċ", "\n").replace("<0x0A>", "\n").replace("Ã©", "é").replace("Â°", "°")
            for run in runs if sample.targets[run[0]]]  # fmt: skip


def reference(folder: Path, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return hf_tokenizer(folder).apply_chat_template(messages, tokenize=True, return_dict=False, **options)


@pytest.mark.parametrize(
    ("style", "answers"),
    [
        ("qwen2.5", ["Nobody.<|im_end|>", " A thé dog.\n<|im_end|>"]),
        ("llama3.1", ["Nobody.<|eot_id|>", "A thé dog.<|eot_id|>"]),
        ("mistral", [" Nobody.</s>", "  A thé dog.\n</s>"]),
        ("gemma", ["Nobody.<end_of_turn>", "A thé dog.<end_of_turn>"]),
        ("phi3", ["Nobody.<|end|>", " A thé dog.\n<|end|>"]),
        ("zephyr", ["Nobody.</s>", " A thé dog.\n</s>"]),
        ("marked", ["Nobody.<|im_end|>", " A thé dog.\n<|im_end|>"]),
        ("marked without end", ["Nobody.<|im_end|>", " A thé dog.\n<|im_end|>"]),
    ],
)
def test_tokens_are_those_of_transformers_and_answers_with_their_end_are_learnt(
    folders: Path, style: str, answers: list[str]
) -> None:
    (sample,) = tokenize(folders / style, {"messages": TALK})
    assert sample.tokens.tolist() == reference(folders / style, TALK)
    assert learnt(folders / style, sample) == answers


def test_a_mask_by_markers_is_that_of_transformers(folders: Path) -> None:
    tokenizer = hf_tokenizer(folders / "marked")
    expected = tokenizer.apply_chat_template([SYSTEM, *TALK], return_dict=True, return_assistant_tokens_mask=True)
    (sample,) = tokenize(folders / "marked", {"messages": [SYSTEM, *TALK]})
    assert sample.targets.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("style", ["qwen2.5", "qwen3", "llama3.1", "phi3", "zephyr", "marked"])
def test_system_prompts_are_written_and_not_learnt(folders: Path, style: str) -> None:
    samples = tokenize(folders / style, {"messages": [SYSTEM, *TALK]})
    assert samples[0].tokens.tolist() == reference(folders / style, [SYSTEM, *TALK])
    assert not any("brief" in text for sample in samples for text in learnt(folders / style, sample))
    beside = tokenize(folders / style, {"system": SYSTEM["content"], "conversations": TALK})
    assert beside[0].tokens.tolist() == samples[0].tokens.tolist()


@pytest.mark.parametrize(
    ("style", "answers"),
    [
        ("qwen2.5", ['<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": null}}\n</tool_call>'
                     "<|im_end|>", "It is 21 °C.<|im_end|>"]),
        ("llama3.1", ['{"name": "get_weather", "parameters": {"city": "Paris", "unit": null}}<|eom_id|>',
                      "It is 21 °C.<|eot_id|>"]),
    ],
)  # fmt: skip
def test_tool_calls_are_learnt_and_what_tools_return_is_not(folders: Path, style: str, answers: list[str]) -> None:
    (sample,) = tokenize(folders / style, {"messages": TOOL_TALK, "tools": TOOLS})
    assert sample.tokens.tolist() == reference(folders / style, TOOL_TALK, tools=TOOLS)
    assert learnt(folders / style, sample) == answers


def test_arguments_and_tools_as_json_text_are_the_same_as_objects(folders: Path) -> None:
    function = CALL["function"]
    call = {"type": "function", "function": {**function, "arguments": json.dumps(function["arguments"])}}
    talk = [TOOL_TALK[0], {"role": "assistant", "content": None, "tool_calls": [call]}, *TOOL_TALK[2:]]
    (sample,) = tokenize(folders / "qwen2.5", {"messages": talk, "tools": json.dumps(TOOLS)})
    assert sample.tokens.tolist() == reference(folders / "qwen2.5", TOOL_TALK, tools=TOOLS)


def test_nulls_that_arrow_adds_do_not_reach_the_template(folders: Path, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"messages": TOOL_TALK}, {"messages": TALK}])
    pq.write_table(table, tmp_path / "talk.parquet")
    section = DataSection.model_validate({"source": "parquet", "path": str(tmp_path / "talk.parquet"), "holdout": 0,
                                          "tokenizer": str(folders / "llama3.1"), "seq_len": 4096,
                                          "samples": {"template": "model"}})  # fmt: skip
    index = SampleIndex.open(prepare_samples(section, rules=None, cache=tmp_path / "cache"))
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
        "name": "get_weather", "arguments": {"city": "Paris"}}}]}  # fmt: skip
    expected = reference(folders / "llama3.1", [TOOL_TALK[0], call, *TOOL_TALK[2:]])
    assert index.sample(0).tokens.tolist() == expected
    assert index.sample(1).tokens.tolist() == reference(folders / "llama3.1", TALK)


def test_an_answer_that_later_turns_change_is_learnt_from_a_text_of_its_own(folders: Path) -> None:
    folder = folders / "qwen3"
    thinking = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nNobody."}
    talk = [QUESTION, thinking, *TALK[2:]]
    full, first = tokenize(folder, {"messages": talk})
    assert full.tokens.tolist() == reference(folder, talk)  # without the thoughts of the first answer
    assert learnt(folder, full) == ["<think>\n\n</think>\n\n A thé dog.\n<|im_end|>"]
    assert first.tokens.tolist() == reference(folder, talk[:2])
    assert learnt(folder, first) == ["<think>\nhm\n</think>\n\nNobody.<|im_end|>"]
    # Each prompt is what generation would see.
    for sample, messages in ((full, talk[:3]), (first, talk[:1])):
        prompt = reference(folder, messages, add_generation_prompt=True)
        assert sample.tokens[: np.flatnonzero(sample.targets)[0]].tolist() == prompt


def test_reasoning_in_a_field_is_written_as_transformers_does(folders: Path) -> None:
    talk = [QUESTION, {**ANSWER, "reasoning": "hm"}]
    (sample,) = tokenize(folders / "qwen3", {"messages": talk})
    assert learnt(folders / "qwen3", sample) == ["<think>\nhm\n</think>\n\nNobody.<|im_end|>"]


@pytest.mark.parametrize("style", STYLES)
def test_a_special_token_in_a_message_stays_text(folders: Path, style: str) -> None:
    tokenizer = hf_tokenizer(folders / style)
    special = STYLES[style][1][-1]
    talk = [{"role": "user", "content": f"a {special} b"}, {"role": "assistant", "content": f"see {special} there"}]
    plain = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "see there"}]
    (sample,) = tokenize(folders / style, {"messages": talk})
    number = tokenizer.convert_tokens_to_ids(special)
    assert np.count_nonzero(sample.tokens == number) == reference(folders / style, plain).count(number)
    written = tokenizer.apply_chat_template(talk, tokenize=False)
    assert tokenizer.decode(sample.tokens.tolist()).replace(" ", "") == written.replace(" ", "")


@pytest.mark.parametrize(
    ("style", "messages", "reason"),
    [
        ("mistral", [QUESTION, QUESTION, ANSWER], "the chat template refuses it: Conversation roles must alternate"),
        ("gemma", [SYSTEM, *TALK], "the chat template refuses it: System role not supported"),
        ("qwen2.5", [ANSWER, *TALK], "it begins with an answer"),
        ("qwen2.5", [{"role": "user", "content": "\ufdd0"}, ANSWER], "U\\+FDD0"),
        ("qwen2.5", [{"role": "user", "content": "\ud800"}, ANSWER], "unpaired surrogate"),
    ],
)
def test_a_conversation_that_the_template_refuses_is_a_bad_sample(
    folders: Path, style: str, messages: list[dict[str, Any]], reason: str
) -> None:
    bad = tokenize(folders / style, {"messages": messages})
    assert isinstance(bad, BadSampleError)
    with pytest.raises(BadSampleError, match=reason):
        raise bad


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{% for message in messages %}{{ message.content }", "line 1"),
        ("{{ messages[0].content }}", "not at all"),
        ("{% if add_generation_prompt %}<think>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
         "another way"),
        ("{{ raise_exception('no') }}", "it fails: no"),
        ("{{ ''.__class__.__mro__ }}", "it fails"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_show_its_answers_is_refused(tmp_path: Path, template: str, what: str) -> None:
    folder = write_model_tokenizer(tmp_path / "model", "qwen2.5", template=template)
    with pytest.raises(UserError, match=what) as refused:
        tokenize(folder, {"messages": TALK})
    assert refused.value.code == "T024"


def test_a_template_file_and_named_templates_are_found_like_transformers_does(tmp_path: Path) -> None:
    folder = write_model_tokenizer(tmp_path / "model", "qwen2.5", template=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    with pytest.raises(UserError, match="without a chat template"):
        tokenize(folder, {"messages": TALK})
    named = [{"name": "default", "template": MARKED}, {"name": "tool_use", "template": QWEN25}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    for talk, tools in ((TALK, None), (TOOL_TALK, TOOLS)):
        (sample,) = tokenize(folder, {"messages": talk, "tools": tools})
        assert sample.tokens.tolist() == reference(folder, talk, tools=tools)
    (folder / "chat_template.jinja").write_text(STYLES["qwen3"][0])
    assert tokenize(folder, {"messages": TALK})[0].tokens.tolist() == reference(folder, TALK)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(QWEN25)
    (sample,) = tokenize(folder, {"messages": TOOL_TALK, "tools": TOOLS})
    assert sample.tokens.tolist() == reference(folder, TOOL_TALK, tools=TOOLS)


def test_a_template_that_writes_the_date_always_writes_the_same(tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y') }}" + MARKED
    folder = write_model_tokenizer(tmp_path / "model", "marked", template=template)
    chat = ChatTokenizer(load_tokenizer(str(folder)), "model", None, 4096)
    assert chat.own_template is not None
    assert chat.own_template.writes_date
    (sample,) = tokenize(folder, {"messages": TALK})
    assert chat.tokenizer.decode_all(sample.tokens.tolist()).startswith("26 Jul 2024<|im_start|>")


PICTURES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [PICTURES, QWEN25], ids=["writes images", "only text"])
def test_images_stand_where_the_conversation_has_them(tmp_path: Path, template: str) -> None:
    folder = write_model_tokenizer(tmp_path / "model", "qwen2.5", template=template)
    tokenizer = hf_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]})
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    messages = [{"role": "user", "content": "<image>what is <|image_pad|>?"}, ANSWER]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages, "image": "a.png"}) + "\n")
    section = DataSection.model_validate({"source": "chat", "path": str(tmp_path / "rows.jsonl"), "holdout": 0,
                                          "tokenizer": str(folder), "samples": {"template": "model"}})  # fmt: skip
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    rules = ImageRules(patch=8, merge=2, image_token=pad)
    sample = SampleIndex.open(prepare_samples(section, rules=rules, cache=tmp_path / "cache")).sample(0)
    assert len(sample.images) == 1
    text = tokenizer.decode(sample.tokens.tolist())
    assert "user\n<|vision_start|><|image_pad|><|vision_end|>what is <|image_pad|>?<|im_end|>" in text
    assert np.count_nonzero(sample.tokens == pad) == 1
    assert tokenizer.decode(sample.tokens[sample.targets].tolist()) == "Nobody.<|im_end|>"


def test_another_template_is_other_data(folders: Path, tmp_path: Path) -> None:
    folder = write_model_tokenizer(tmp_path / "model", "qwen2.5")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    section = DataSection.model_validate({"source": "chat", "path": str(tmp_path / "rows.jsonl"), "holdout": 0,
                                          "tokenizer": str(folder), "samples": {"template": "model"}})  # fmt: skip
    paths = [prepare_samples(section, rules=None, cache=tmp_path / "cache") for _ in range(2)]
    (folder / "chat_template.jinja").write_text(QWEN25.replace("You are Qwen, created by Alibaba Cloud. ", ""))
    paths.append(prepare_samples(section, rules=None, cache=tmp_path / "cache"))
    assert paths[0] == paths[1] != paths[2]
    assert SampleIndex.open(paths[0]).digest != SampleIndex.open(paths[2]).digest
    reopened = SampleIndex.open(paths[2]).tokenizer.describe()  # from the files in the cache
    assert reopened["sha256"] == load_tokenizer(str(folder)).describe()["sha256"]
