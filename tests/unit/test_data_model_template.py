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
from trimaran.data import (
    BadSampleError,
    ChatTokenizer,
    ImageFinder,
    SampleIndex,
    load_tokenizer,
    prepare_samples,
    sample_of,
)

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


def tokenize(folder: Path, row: dict[str, Any], text_field: str = "text", template: str = "model") -> Any:
    """Return the samples of one row of chat data, or why it is bad."""
    chat = ChatTokenizer(load_tokenizer(str(folder)), template, None, 4096)
    raw = sample_of("x.jsonl", 1, row, ImageFinder("/"), text_field)
    return BadSampleError(raw.bad) if raw.bad else chat.tokenize([raw])[0]


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


FUNCTION = TOOLS[0]["function"]
WRITTEN_CALL = json.dumps({"name": "get_weather", "arguments": CALL["function"]["arguments"]})
DEVELOPER = {"role": "developer", "content": "Be brief."}
ANSWERS = ["Nobody.<|im_end|>", " A thé dog.\n<|im_end|>"]
SHAREGPT_TOOLS = {
    "conversations": [
        {"from": "human", "value": "Weather in Paris?"},
        {"from": "function_call", "value": WRITTEN_CALL},
        {"from": "observation", "value": "21 °C"},
        {"from": "gpt", "value": "It is 21 °C."},
    ],
    "tools": json.dumps([FUNCTION]),
}
# Rows of other programs: their fields, the messages that they stand for, and which answers are learnt.
ROWS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[str]]] = {
    "Dolly": (
        {"instruction": "Who is", "context": "there?", "response": "Nobody.", "category": "closed_qa"},
        [{"role": "user", "content": "Who is\nthere?"}, ANSWER],
        ANSWERS[:1],
    ),
    "Alpaca of LLaMA-Factory": (
        {"instruction": "And", "input": "? ", "output": " A thé dog.\n", "system": "Be brief.",
         "history": [["Who is there?", "Nobody."]]},
        [SYSTEM, *TALK[:2], {"role": "user", "content": "And\n? "}, TALK[3]],
        ANSWERS,
    ),
    "OpenOrca": (
        {"id": "x", "system_prompt": "Be brief.", "question": "Who is there?", "response": "Nobody."},
        [SYSTEM, *TALK[:2]],
        ANSWERS[:1],
    ),
    "a prompt and a completion of messages": (
        {"prompt": [SYSTEM, *TALK[:3]], "completion": TALK[3:]},
        [SYSTEM, *TALK],
        ANSWERS[1:],
    ),
    "a weight of 0": (
        {"messages": [QUESTION, {**ANSWER, "weight": 0}, TALK[2], {**TALK[3], "weight": 1}]},
        TALK,
        ANSWERS[1:],
    ),
    "a weight of 0 at the end": ({"messages": [*TALK[:3], {**TALK[3], "weight": 0}]}, TALK, ANSWERS[:1]),
    "no loss for one answer": ({"messages": [QUESTION, {**ANSWER, "loss": False}, *TALK[2:]]}, TALK, ANSWERS[1:]),
    "no training on one answer": (
        {"messages": [QUESTION, {**ANSWER, "training": False}, *TALK[2:]]},
        TALK,
        ANSWERS[1:],
    ),
    "a developer, whom this template does not know": ({"messages": [DEVELOPER, *TALK]}, [SYSTEM, *TALK], ANSWERS),
    "a completion that repeats the prompt": (
        {"prompt": "Nobody.", "completion": [ANSWER]},
        [{"role": "user", "content": "Nobody."}, ANSWER],
        ANSWERS[:1],
    ),
    "messages as JSON text": ({"messages": json.dumps(TALK)}, TALK, ANSWERS),
}  # fmt: skip


@pytest.mark.parametrize("style", ["qwen2.5", "marked"])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_other_programs_are_written_like_the_messages_they_stand_for(
    folders: Path, kind: str, style: str
) -> None:
    row, messages, answers = ROWS[kind]
    (sample,) = tokenize(folders / style, row)
    assert sample.tokens.tolist() == reference(folders / style, messages)
    assert learnt(folders / style, sample) == answers


def test_calls_and_results_of_sharegpt_are_those_of_messages(folders: Path) -> None:
    (sample,) = tokenize(folders / "qwen2.5", SHAREGPT_TOOLS)
    assert sample.tokens.tolist() == reference(folders / "qwen2.5", TOOL_TALK, tools=TOOLS)
    assert len(learnt(folders / "qwen2.5", sample)) == 2


def test_functions_of_openai_are_tools(folders: Path) -> None:
    arguments = json.dumps(CALL["function"]["arguments"])
    called = {"role": "assistant", "function_call": {"name": "get_weather", "arguments": arguments}}
    result = {"role": "function", "name": "get_weather", "content": TOOL_TALK[2]["content"]}
    row = {"messages": [TOOL_TALK[0], called, result, *TOOL_TALK[3:]], "functions": [FUNCTION]}
    (sample,) = tokenize(folders / "qwen2.5", row)
    assert sample.tokens.tolist() == reference(folders / "qwen2.5", TOOL_TALK, tools=TOOLS)
    assert len(learnt(folders / "qwen2.5", sample)) == 2


def test_a_template_that_knows_developers_writes_them(tmp_path: Path) -> None:
    template = QWEN25.replace('message.role == "user"', 'message.role == "user" or message.role == "developer"')
    folder = write_model_tokenizer(tmp_path / "model", "qwen2.5", template=template)
    (sample,) = tokenize(folder, {"messages": [DEVELOPER, *TALK]})
    assert sample.tokens.tolist() == reference(folder, [DEVELOPER, *TALK])
    assert "<|im_start|>developer\nBe brief." in hf_tokenizer(folder).decode(sample.tokens.tolist())


@pytest.mark.parametrize(
    ("row", "messages", "answers"),
    [
        ({"prompt": "Who is there?", "chosen": "Nobody.", "rejected": "!"}, TALK[:2], ANSWERS[:1]),
        ({"prompt": "Who is there?", "chosen": TALK[:2], "rejected": [QUESTION]}, TALK[:2], ANSWERS[:1]),
        ({"prompt": TALK[:3], "chosen": TALK[3:], "rejected": TALK[3:]}, TALK, ANSWERS[1:]),
        ({"conversations": TALK[:3], "chosen": TALK[3], "rejected": TALK[3]}, TALK, ANSWERS[1:]),
        ({"chosen": TALK, "rejected": TALK}, TALK, ANSWERS),
    ],
)
def test_chosen_answers_are_learnt_if_they_are_named(
    folders: Path, row: dict[str, Any], messages: list[dict[str, Any]], answers: list[str]
) -> None:
    (sample,) = tokenize(folders / "qwen2.5", row, "chosen")
    assert sample.tokens.tolist() == reference(folders / "qwen2.5", messages)
    assert learnt(folders / "qwen2.5", sample) == answers
    for field in ("text", "rejected"):
        with pytest.raises(BadSampleError, match="preference data"):
            raise tokenize(folders / "qwen2.5", row, field)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}, "weight of a message is 0.5"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0}]}, "no answer is learnt"),
        ({"messages": [QUESTION, {**ANSWER, "train_detail": [{"train": False}]}]}, "only a part of a message"),
        ({"instruction": "a", "output": ["b", "c"]}, "2 texts where one is expected"),
        ({"prompt": TALK, "completion": [QUESTION]}, "no answer is learnt"),
        ({"conversations": [{"from": "function_call", "value": "get_weather()"}]}, "a tool call is not JSON"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "'history' is not a list of questions"),
        ({"instruction": "a", "output": "b", "context": {"c": "d"}}, "'context' beside the question is not a text"),
    ],
)
def test_a_row_that_cannot_be_read_completely_is_bad(folders: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadSampleError, match=reason):
        raise tokenize(folders / "qwen2.5", row)


def test_what_a_template_leaves_out_is_not_left_out_in_silence(folders: Path) -> None:
    for style, messages, reason in (
        ("zephyr", TOOL_TALK, "leaves out messages of the role tool"),
        ("phi3", TOOL_TALK[:2], "leaves out tool calls"),
    ):
        with pytest.raises(BadSampleError, match=reason):
            raise tokenize(folders / style, {"messages": messages})


def test_a_named_template_has_the_system_prompt_and_refuses_tools(folders: Path) -> None:
    row = {"instruction": "Who is there?", "output": "Nobody.", "system": "Be brief."}
    (sample,) = tokenize(folders / "qwen2.5", row, template="chatml")
    assert sample.tokens.tolist() == reference(folders / "qwen2.5", [SYSTEM, *TALK[:2]])
    (sample,) = tokenize(folders / "qwen2.5", {"messages": [DEVELOPER, *TALK[:2]]}, template="chatml")
    assert sample.tokens.tolist() == reference(folders / "qwen2.5", [SYSTEM, *TALK[:2]])
    with pytest.raises(BadSampleError, match="it has tools, which the template chatml cannot write"):
        raise tokenize(folders / "qwen2.5", {"messages": TALK, "tools": TOOLS}, template="chatml")


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
