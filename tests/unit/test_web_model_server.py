"""What the chat page reads from a model server: addresses, metrics and the parts of a stream."""

import json
from typing import Any

import pytest

pytest.importorskip("nicegui")

from trimaran.core import UserError
from trimaran.ui import Answer, ChatSettings, checked_address, costs_markup, parse_metrics, take_part, talk_markup


def test_addresses_lose_their_path_and_other_kinds_are_refused() -> None:
    assert checked_address("http://127.0.0.1:8000/v1") == "http://127.0.0.1:8000"
    assert checked_address(" localhost:8000 ") == "http://localhost:8000"
    for address in ("", "file:///etc/passwd", "http://", "http://host:0", "http://host:99999", "ftp://host"):
        with pytest.raises(UserError, match="W008"):
            checked_address(address)


def test_only_our_own_metrics_are_read() -> None:
    text = (
        "# HELP trimaran_serve_pages Pages.\n# TYPE trimaran_serve_pages gauge\ntrimaran_serve_pages 512.0\n"
        'trimaran_serve_requests_total{path="/x"} 3.0\nother_total 1.0\ntrimaran_serve_ready none\n'
    )
    assert parse_metrics(text) == {"pages": 512.0}


def part(text: str | None = None, **fields: Any) -> str:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": None}
    return json.dumps({"choices": [choice]} | fields)


def test_parts_of_a_stream_become_an_answer_with_its_costs() -> None:
    answer = Answer()
    assert take_part(answer, part(""))
    assert answer.first_seconds is None  # the role alone is no token
    for text in ("Hel", "lo", "!"):
        assert take_part(answer, part(text))
    assert take_part(answer, json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}))
    assert not take_part(answer, "[DONE]")
    assert not take_part(answer, "{torn")
    assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == ("Hello!", 7, 5)
    answer.first_seconds, answer.last_seconds = 0.5, 2.5
    assert answer.tokens_per_second == 2.0
    load = {"pages": 10.0, "used_pages": 5.0, "running_requests": 2.0, "waiting_requests": 1.0}
    shown = costs_markup(answer, load)
    for text in ("500 ms", "2.0", "7 + 5", "2 + 1", "50%"):
        assert text in shown
    with pytest.raises(UserError, match="too long"):
        take_part(answer, json.dumps({"error": {"message": "too long"}}))


def test_texts_of_a_model_are_no_markup() -> None:
    shown = talk_markup([{"role": "user", "content": "<script>"}, {"role": "assistant", "content": "<img src=x>"}])
    assert "<script>" not in shown
    assert "<img" not in shown


def test_a_request_has_the_system_prompt_first_and_asks_for_usage() -> None:
    settings = ChatSettings(model="m", system="Be brief.", temperature=0.0, max_tokens=8)
    body = settings.body([{"role": "user", "content": "Hi"}])
    assert [each["role"] for each in body["messages"]] == ["system", "user"]
    assert body["stream_options"] == {"include_usage": True}
    assert "model" not in ChatSettings().body([])
