"""`trimaran serve`: what its API answers, with a real engine, over real sockets."""

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest

from tests.serving import MODEL, TOKEN, RunningServer, greedy_text, running_server, save_adapter, save_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]},
                   "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}},
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}  # fmt: skip
ADAPTERS = ("law", "code")
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a trimaran?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("serve")
    model = save_tiny_model(folder / "model")
    adapters = [f"--adapter={name}={save_adapter(model, folder / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    with running_server(model, "--max-body-mb", "1", *adapters, log=folder / "log") as running:
        running.folder = folder
        yield running


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """Return the status and the code of an error, which has all its fields."""
    error = answer.json()["error"]
    assert {"message", "type", "param", "code", "what", "where", "fix"} == error.keys()
    return answer.status_code, error["code"]


def test_a_stream_has_the_text_of_the_whole_answer(server: RunningServer) -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 11, "logprobs": 3}
    whole = server.complete("def f(", **fields)
    parts = list(server.stream("/v1/completions", prompt="def f(", stream_options={"include_usage": True}, **fields))
    choices = [part["choices"][0] for part in parts[:-1]]
    assert "".join(each["text"] for each in choices) == whole["choices"][0]["text"]
    tokens = [token for each in choices for token in each["logprobs"]["tokens"]]
    assert tokens == whole["choices"][0]["logprobs"]["tokens"]
    assert len(tokens) == 40
    assert (parts[-1]["choices"], parts[-1]["usage"]) == ([], whole["usage"])
    assert [each["finish_reason"] for each in choices] == [None] * (len(choices) - 1) + ["length"]


def test_a_chat_streams_a_role_and_then_the_content(server: RunningServer) -> None:
    fields = {"messages": CHAT, "max_tokens": 20, "temperature": 0}
    whole = server.client.post("/v1/chat/completions", json=fields).json()
    deltas = [part["choices"][0]["delta"] for part in server.stream("/v1/chat/completions", **fields)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    text = "".join(each.get("content", "") for each in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    assert whole["system_fingerprint"] == f"{MODEL}@model"
    assert whole["usage"]["completion_tokens"] == 20


def test_answers_do_not_depend_on_what_is_asked_at_the_same_time(server: RunningServer) -> None:
    prompts = [f"number {each}: " + "x" * each for each in range(12)]
    alone = [server.complete(each, max_tokens=24, seed=3, temperature=0.7)["choices"][0]["text"] for each in prompts]
    together: dict[int, str] = {}

    def ask(number: int) -> None:
        answer = server.complete(prompts[number], max_tokens=24, seed=3, temperature=0.7)
        together[number] = answer["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    batch = server.complete(prompts, max_tokens=24, seed=3, temperature=0.7)["choices"]
    assert [together[number] for number in range(len(prompts))] == alone
    assert [each["text"] for each in batch] == alone


def test_a_stop_sequence_ends_the_text_before_it(server: RunningServer) -> None:
    text = server.complete("class ", max_tokens=60)["choices"][0]["text"]
    stop = text[20:23]
    first = text.find(stop)
    stopped = server.complete("class ", max_tokens=60, stop=[stop, "never in it"])["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (text[:first], "stop")
    parts = server.stream("/v1/completions", prompt="class ", temperature=0, max_tokens=60, stop=stop)
    assert "".join(part["choices"][0]["text"] for part in parts) == text[:first]


def test_seeds_give_the_same_answers_and_each_of_n_has_its_own(server: RunningServer) -> None:
    fields = {"max_tokens": 16, "temperature": 1.2, "seed": 5}
    texts = [each["text"] for each in server.complete("a", n=3, **fields)["choices"]]
    assert texts == [each["text"] for each in server.complete("a", n=3, **fields)["choices"]]
    assert len(set(texts)) == 3
    assert texts[1] == server.complete("a", **fields | {"seed": 6})["choices"][0]["text"]


def test_each_request_gets_the_adapter_that_it_names(server: RunningServer) -> None:
    names: dict[str, Path] = {MODEL: server.folder / "model"} | {each: server.folder / each for each in ADAPTERS}
    expected = {name: greedy_text(folder, "def add(", 24) for name, folder in names.items()}
    assert len(set(expected.values())) == 3
    found: dict[str, dict[str, Any]] = {}

    def ask(name: str) -> None:
        found[name] = server.complete("def add(", model=name, max_tokens=24, ignore_eos=True)

    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert {name: answer["choices"][0]["text"] for name, answer in found.items()} == expected
    assert found["law"]["system_fingerprint"] == f"{MODEL}@model+law"


def test_top_k_of_one_is_the_likeliest_token(server: RunningServer) -> None:
    greedy = server.complete("import ", max_tokens=16)["choices"][0]["text"]
    assert server.complete("import ", max_tokens=16, temperature=1, top_k=1)["choices"][0]["text"] == greedy


def test_log_probabilities_of_answer_and_prompt(server: RunningServer) -> None:
    found = server.complete("abc", max_tokens=4, logprobs=2, echo=True)["choices"][0]
    logprobs = found["logprobs"]
    assert found["text"].startswith("abc")
    assert logprobs["tokens"][:3] == ["a", "b", "c"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert [len(each) for each in logprobs["top_logprobs"][1:]] == [2] * 6
    likeliest = [max(each.values()) for each in logprobs["top_logprobs"][3:]]
    assert logprobs["token_logprobs"][3:] == pytest.approx(likeliest)
    chat = {"messages": CHAT, "max_tokens": 3, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    content = server.client.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
    assert [len(each["top_logprobs"]) for each in content] == [2, 2, 2]
    assert content[0]["logprob"] == pytest.approx(content[0]["top_logprobs"][0]["logprob"])


def test_token_ids_are_a_prompt_too(server: RunningServer) -> None:
    assert (
        server.complete([97, 98], max_tokens=8)["choices"][0]["text"]
        == (server.complete("ab", max_tokens=8)["choices"][0]["text"])
    )


def test_embeddings_have_norm_one_in_both_encodings(server: RunningServer) -> None:
    body: dict[str, Any] = {"input": ["one", "another text"]}
    found = server.client.post("/v1/embeddings", json=body).json()
    rows = np.array([each["embedding"] for each in found["data"]])
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1.0, abs=1e-5)
    packed = server.client.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()
    decoded = np.frombuffer(base64.b64decode(packed["data"][1]["embedding"]), dtype="<f4")
    assert decoded == pytest.approx(rows[1], abs=1e-6)
    assert found["usage"] == {"prompt_tokens": 15, "total_tokens": 15}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_guided_json_follows_its_schema(server: RunningServer, seed: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    body = {"messages": CHAT, "temperature": 1.0, "seed": seed, "response_format": wanted, "max_tokens": 200}
    choice = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_a_schema_that_cannot_be_used_is_refused(server: RunningServer) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    answer = server.client.post("/v1/completions", json={"prompt": "a", "response_format": wanted})
    assert error_of(answer) == (400, "U011")


def test_models_are_listed(server: RunningServer) -> None:
    model, *adapters = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, 4096)
    assert [(each["id"], each["parent"]) for each in adapters] == [("law", MODEL), ("code", MODEL)]
    assert server.client.get(f"/v1/models/{MODEL}").json() == model
    assert error_of(server.client.get("/v1/models/other")) == (404, "U002")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{not json", 400, "U001"),
        (b'{"prompt": {"a": 1}}', 400, "U001"),
        (b'{"prompt": "a", "max_tokens": 1.5}', 400, "U001"),
        (b'{"prompt": []}', 400, "U001"),
        (b'{"prompt": [99999]}', 400, "U001"),
        (b'{"prompt": "a", "model": "tinny"}', 404, "U002"),
        (json.dumps({"prompt": "x" * 5000}).encode(), 400, "U003"),
        (json.dumps({"prompt": "x" * (1 << 20)}).encode(), 413, "U007"),
    ],
)
def test_wrong_requests_get_clear_errors(server: RunningServer, body: bytes, status: int, code: str) -> None:
    assert error_of(server.client.post("/v1/completions", content=body)) == (status, code)


def test_wrong_places_and_wrong_visitors_get_clear_errors(server: RunningServer) -> None:
    assert error_of(server.client.get("/v1/nothing")) == (404, "U016")
    assert error_of(server.client.get("/v1/completions")) == (405, "U017")
    assert error_of(httpx.get(f"{server.url}/v1/models")) == (401, "U005")
    assert error_of(httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer no"})) == (401, "U005")
    headers = {"authorization": f"Bearer {TOKEN}", "host": "evil.example"}
    assert error_of(httpx.get(f"{server.url}/v1/models", headers=headers)) == (403, "U006")
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "this?"}, image]}]
    assert error_of(server.client.post("/v1/chat/completions", json={"messages": messages})) == (400, "U004")


def test_probes_and_metrics(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
    before = server.metrics()
    server.complete("a", max_tokens=7)
    server.wait_idle()
    after = server.metrics()
    assert after["generated_tokens_total"] - before["generated_tokens_total"] == 7
    count = "time_to_first_token_seconds_count"
    assert after[count] - before[count] == 1
    answers = 'requests_total{path="/v1/completions",status="200"}'
    assert after[answers] - before.get(answers, 0.0) == 1
