"""The parts of the server that need no process: stop sequences, the queue, the fields of requests, the protocol."""

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from trimaran.core import UserError
from trimaran.data import ByteTokenizer
from trimaran.serve import (
    NEXT_SECONDS,
    OPTIONS,
    AccessMiddleware,
    AnswerChoice,
    AnswerHead,
    AnswerText,
    ChatCall,
    CompletionCall,
    CompletionFormat,
    EngineLimits,
    EngineRequest,
    ModelTexts,
    PreparedPrompt,
    PromptReader,
    RequestQueue,
    ServingMetrics,
    TokenOutput,
    TokenTimes,
    VllmRequest,
    check_folder,
    dump_message,
    may_have_many_values,
    output_from_json,
    output_to_json,
    parse_call,
    plan_vllm,
    refuse_many_values,
    request_from_json,
    request_to_json,
    stopping,
    vllm_options,
)
from trimaran.serve.server import answer_response
from trimaran.train import PlacedImage, Sampling

GREEDY = Sampling(temperature=0)


def parts_of(text: str, *stops: str) -> tuple[list[str], bool]:
    """Return the parts of a text whose tokens are bytes, and whether it was stopped."""
    answer = AnswerText(ByteTokenizer(), (), stops)
    parts = []
    for token in text.encode():
        parts.append(answer.add([token]))
        if answer.is_stopped:
            return parts, True
    return [*parts, answer.finish()], answer.is_stopped


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stopped"),
    [
        ("one. two", (". ",), "one", True),
        ("abcabd", ("abd",), "abc", True),
        ("aaab", ("aab",), "a", True),
        ("ends with a sto", ("stop",), "ends with a sto", False),
        ("é and ü", ("ü",), "é and ", True),
        ("xyz", ("z", "yz"), "x", True),
        ("plain", (), "plain", False),
    ],
)
def test_text_ends_before_a_stop_sequence_and_nothing_of_it_is_shown_early(
    text: str, stops: tuple[str, ...], shown: str, stopped: bool
) -> None:
    parts, is_stopped = parts_of(text, *stops)
    assert ("".join(parts), is_stopped) == (shown, stopped)


def test_text_that_cannot_be_a_stop_sequence_does_not_wait() -> None:
    assert parts_of("ab!c", "b?")[0] == ["a", "", "b!", "c", ""]


def choice_of(*stops: str, records: bool = False) -> AnswerChoice:
    return AnswerChoice(PreparedPrompt((97,), frozenset()), ByteTokenizer(), stops, records=records)


def outputs_of(text: bytes) -> list[TokenOutput]:
    """Return an output for each byte, with a log-probability; the last ends the answer."""
    found = [TokenOutput(request="x", token=token, logprob=-float(number)) for number, token in enumerate(text)]
    return [*found[:-1], found[-1]._replace(finish="length")]


@pytest.mark.parametrize("stops", [(), ("d f",)])
def test_outputs_that_come_together_add_what_they_add_one_by_one(stops: tuple[str, ...]) -> None:
    outputs = outputs_of("ab é cd fgh".encode())
    alone, together = choice_of(*stops, records=True), choice_of(*stops, records=True)
    for output in outputs:
        if not alone.is_finished:
            alone.add([output])
    together.add(outputs[:4])  # inside é
    if not together.is_finished:
        together.add(outputs[4:])
    assert together.whole == alone.whole
    assert together.num_tokens == alone.num_tokens == len(together.whole.tokens)
    assert together.whole.text == ("ab é c" if stops else "ab é cd fgh")
    assert together.whole.finish == ("stop" if stops else "length")


def test_a_call_is_woken_up_by_as_many_outputs_as_it_awaits_or_by_the_last_one() -> None:
    async def work() -> None:
        queue = RequestQueue(max_waiting=9)
        ticket = queue.submit([request("a"), request("b")], free=2)
        list(queue.take(2, "w"))
        taking = asyncio.create_task(ticket.take(3))
        for name in ("a", "b"):
            queue.receive([TokenOutput(request=name, token=1)])
            await asyncio.sleep(0)
            assert not taking.done()
        queue.receive([TokenOutput(request="a", token=2)])
        assert [[each.token for each in of_one] for of_one in (await taking).values()] == [[1, 2], [1]]
        queue.receive([TokenOutput(request="b", token=2, finish="stop")])
        assert [each.finish for each in (await ticket.take(3))[1]] == ["stop"]
        queue.receive([TokenOutput(request="a", token=3), TokenOutput(request="a", finish="error", error="NaN")])
        assert [each.token for each in (await ticket.take(3))[0]] == [3]
        with pytest.raises(UserError) as caught:
            await ticket.take(3)
        assert caught.value.code == "U010"

    run(work())


def request(name: str, **fields: Any) -> EngineRequest:
    return EngineRequest(id=name, prompt=(1, 2), sampling=GREEDY, max_tokens=4, **fields)


def run(work: Any) -> Any:
    return asyncio.run(work)


def test_a_full_queue_refuses_whole_calls_and_counts_free_places() -> None:
    async def work() -> None:
        queue = RequestQueue(max_waiting=2)
        queue.submit([request("a"), request("b"), request("c")], free=1)
        with pytest.raises(UserError) as caught:
            queue.submit([request("d")], free=0)
        assert caught.value.code == "U008"
        assert queue.num_waiting == 3
        assert [each.request.id for each in queue.take(1, "w")] == ["a"]
        with pytest.raises(UserError):
            queue.submit([request("d"), request("e")], free=1)
        queue.submit([request("d")], free=1)

    run(work())


def test_after_a_death_requests_go_on_with_their_tokens_and_those_that_ran_come_first() -> None:
    async def work() -> None:
        queue = RequestQueue(max_waiting=9)
        queue.submit([request("a"), request("b"), request("c")], free=3)
        list(queue.take(2, "w"))
        queue.receive([TokenOutput(request="b", token=7, prompt_logprobs=(None, -1.0))])
        queue.crash()
        taken = [each.remaining for each in queue.take(3, "w")]
        assert [(each.id, each.generated) for each in taken] == [("a", ()), ("b", (7,)), ("c", ())]

    run(work())


def test_a_request_that_ran_in_two_deaths_fails() -> None:
    async def work() -> None:
        queue = RequestQueue(max_waiting=9)
        ticket = queue.submit([request("a")], free=1)
        for _ in range(2):
            list(queue.take(1, "w"))
            queue.crash()
        with pytest.raises(UserError) as caught:
            await ticket.take()
        assert caught.value.code == "U010"
        assert (queue.num_waiting, ticket.num_open) == (0, 0)

    run(work())


def test_an_answer_never_mixes_two_sets_of_weights() -> None:
    async def work() -> None:
        queue = RequestQueue(max_waiting=9)
        begun, fresh = queue.submit([request("a")], free=2), queue.submit([request("b")], free=2)
        list(queue.take(2, "step-1"))
        queue.receive([TokenOutput(request="a", token=7)])
        queue.crash()
        queue.change_weights("step-2")
        assert await begun.take() == {0: [TokenOutput(request="a", token=7)]}
        with pytest.raises(UserError) as caught:
            await begun.take()
        assert caught.value.code == "U010"
        assert [each.request.id for each in queue.take(2, "step-2")] == ["b"]
        assert fresh.weights == "step-2"

    run(work())


def test_while_weights_change_only_answers_that_have_begun_go_on() -> None:
    async def work() -> None:
        queue = RequestQueue(max_waiting=9)
        queue.submit([request("a"), request("b")], free=2)
        list(queue.take(1, "w"))
        queue.receive([TokenOutput(request="a", token=1)])
        queue.crash()
        assert [each.request.id for each in queue.take(9, "w", only_begun=True)] == ["a"]
        assert queue.num_waiting == 1

    run(work())


def test_a_cancelled_call_leaves_nothing_behind() -> None:
    async def work() -> None:
        queue = RequestQueue(max_waiting=9)
        ticket, other = queue.submit([request("a"), request("b")], free=1), queue.submit([request("c")], free=0)
        list(queue.take(1, "w"))
        assert queue.cancel(ticket) == ["a"]
        assert (queue.num_waiting, queue.num_running, ticket.num_open, other.num_open) == (1, 0, 0, 1)
        queue.receive([TokenOutput(request="a", token=3)])  # it was on its way
        queue.fail_all(stopping())
        with pytest.raises(UserError):
            await other.take()

    run(work())


def test_requests_and_outputs_survive_the_protocol() -> None:
    image = PlacedImage(np.arange(24, dtype=np.uint8).reshape(2, 12), np.array([[1, 2]]), 1, 1)
    sent = EngineRequest(
        id="x", prompt=(5, 6, 7), sampling=Sampling(temperature=0.5, top_k=3, top_p=0.9, seed=2**63 - 1), max_tokens=9,
        stop_ids=frozenset([1, 256]), generated=(8, 9), logprobs=2, prompt_logprobs=True, adapter="law",
        images=(image,), grammar='{"type":"object"}',
    )  # fmt: skip
    got = request_from_json(parsed(request_to_json(sent)))
    assert request_to_json(got) == parsed(request_to_json(sent)) | {"prompt": (5, 6, 7), "generated": (8, 9)} | {
        "images": [parsed(request_to_json(sent))["images"][0] | {"shape": (2, 12)}]
    }
    assert np.array_equal(got.images[0].patches, image.patches)
    output = TokenOutput(request="x", token=3, logprob=-0.5, top=((3, -0.5), (4, -1.5)), finish="length",
                         prompt_logprobs=(None, -2.0), prompt_top=((), ((1, -0.25),)))  # fmt: skip
    assert output_from_json(parsed(output_to_json(output))) == output
    plain = TokenOutput(request="x", token=0)
    assert output_to_json(plain) == ["x", 0]
    assert output_from_json(parsed(output_to_json(plain))) == plain
    embedding = TokenOutput(request="x", finish="stop", embedding=(0.5, -0.25))
    assert output_from_json(parsed(output_to_json(embedding))) == embedding


def test_times_between_tokens_are_written_as_a_histogram_of_the_library_writes_them() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    times, histogram = TokenTimes("a_seconds", "b", NEXT_SECONDS), Histogram("a_seconds", "b", buckets=NEXT_SECONDS,
                                                                             registry=theirs)  # fmt: skip
    ours.register(times)
    for seconds in (0.0, 0.001, 0.0011, 5.0, 6.0):
        times.observe(seconds)
        histogram.observe(seconds)
    written = [[line for line in generate_latest(each).decode().splitlines() if "_created " not in line]
               for each in (ours, theirs)]  # fmt: skip
    assert written[0] == written[1]


def parsed(values: Any) -> Any:
    return json.loads(dump_message(values))


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"{", "the body"),
        (b"[]", "the body"),
        (b'{"prompt": 5}', "prompt"),
        (b'{"prompt": "a", "max_tokens": "many"}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        (b'{"prompt": "a", "temperature": -1}', "temperature"),
        (b'{"prompt": "a", "top_p": 1.5}', "top_p"),
        (b'{"prompt": "a", "n": 0}', "n"),
        (b'{"prompt": "a", "stop": [""]}', "stop"),
        (b'{"prompt": "a", "frequency_penalty": 0.5}', "frequency_penalty"),
        (b'{"prompt": "a", "tools": [{}]}', "tools"),
        (b'{"prompt": "a", "temprature": 1}', "temprature"),
        (b'{"prompt": "\\ud800"}', "the body"),
        (b"\xff\xfe", "the body"),
    ],
)
def test_wrong_fields_are_named(body: bytes, where: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_call(CompletionCall, body)
    assert caught.value.code == "U001"
    assert caught.value.where.startswith(where)


MANY = b'{"prompt": "' + b"[{:," * 300_000 + b'\\"\\\\", "metadata": %s}'


@pytest.mark.parametrize(
    ("metadata", "names"),
    [
        (b"[" + b"[]," * (1 << 16) + b"1]", "lists and objects"),
        (b"{" + b",".join(b'"%x": 1' % number for number in range(1 << 18)) + b"}", "texts and fields"),
        (b"[" + b'"",' * (1 << 18) + b"1]", "texts and fields"),
        (b"[" + b"1," * (5 << 20) + b"1]", "values"),
    ],
)
def test_bodies_of_very_many_values_are_refused_before_they_are_parsed(metadata: bytes, names: str) -> None:
    body = MANY % metadata
    assert may_have_many_values(body)
    with pytest.raises(UserError, match=f"the body has more than [0-9,]+ {names}"):
        refuse_many_values(body)


def test_marks_inside_texts_are_no_values() -> None:
    for body in (MANY % b"null", MANY % b'{"a": "\\\\\\"[["}', MANY % b'["[", "\\\\", "[[", "\\\\\\\\\\"["]'):
        assert json.loads(body)
        assert may_have_many_values(body)
        refuse_many_values(body)
    assert not may_have_many_values(b'{"prompt": "a"}')


class CountingTokenizer(ByteTokenizer):
    """Bytes as tokens; counts the characters that it has encoded."""

    num_characters = 0

    def encode(self, text: str) -> np.ndarray:
        self.num_characters += len(text)
        return super().encode(text)


def test_of_a_text_that_is_much_too_long_only_the_beginning_is_tokenised() -> None:
    tokenizer = CountingTokenizer()
    reader = PromptReader(ModelTexts(tokenizer=tokenizer, stop_ids=frozenset(), rules=None, template="plain"))
    limits = EngineLimits(max_length=50_000, max_sequences=1, num_pages=10_000, page_size=16, vocabulary=257)
    for texts in (["a" * (4 << 20)], ["a" * 40_000] * 100):
        tokenizer.num_characters = 0
        with pytest.raises(UserError, match=r"the prompt has 4,[0-9,]+ characters, and at most 50000 tokens fit"):
            reader.refuse_much_too_long(texts, limits, where="prompt")
        assert tokenizer.num_characters < 100_000
    reader.refuse_much_too_long(["a" * 50_000], limits, where="prompt")
    reader.refuse_much_too_long(["a" * 25_000] * 2, limits, where="prompt")


def test_neutral_fields_are_accepted() -> None:
    body = b'{"messages": [{"role": "user", "content": "a"}], "presence_penalty": 0, "logit_bias": {}, "user": "me"}'
    assert parse_call(ChatCall, body).messages[0].content == "a"


class QueueClient:
    """The engine's client as far as an answer uses it: notes which calls were cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[Any] = []

    def cancel(self, ticket: Any) -> None:
        self.cancelled.append(ticket)


def test_a_client_that_takes_nothing_for_too_long_is_left() -> None:
    async def work() -> None:
        queue, client, metrics = RequestQueue(max_waiting=9), QueueClient(), ServingMetrics()
        ticket, sent = queue.submit([request("a")], free=1), []
        list(queue.take(1, "w"))
        queue.receive([TokenOutput(request="a", token=97)])
        shape = CompletionFormat(AnswerHead(model="m", prefix="c"), ByteTokenizer(), 1, logprobs=False)
        answer = answer_response.PendingAnswer(client=cast(Any, client), metrics=metrics, ticket=ticket,
                                               choices=[choice_of()], format=shape, fingerprint=str)  # fmt: skip

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        response = answer_response.AnswerResponse(answer, stream=True, max_send_seconds=0.05)
        await asyncio.wait_for(response({"type": "http"}, receive, send), 30)
        assert b'"text":"a"' in sent[-1]["body"]
        assert client.cancelled == [ticket]
        assert b'path="' not in metrics.text(), "an answer that was not sent is not counted"

    run(work())


async def inner(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the body that reached it."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def ask(path: str = "/v1/models", *, parts: tuple[bytes, ...] = (b"",), **headers: str) -> tuple[int, bytes]:
    """Return the status and body of an answer behind the middleware; `_` in names of headers is `-`."""
    app = AccessMiddleware(inner, token="secret", hosts=("127.0.0.1", "localhost"), max_body_bytes=10)
    given = {"host": "127.0.0.1:80", "authorization": "Bearer secret"} | headers
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items() if value]
    messages = [
        {"type": "http.request", "body": part, "more_body": number + 1 < len(parts)}
        for number, part in enumerate(parts)
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": "POST", "headers": pairs, "query_string": b""}
    run(app(scope, receive, send))
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:])


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"authorization": ""}, 401, b"U005"),
        ({"authorization": "Bearer wrong"}, 401, b"U005"),
        ({"authorization": "secret"}, 401, b"U005"),
        ({"host": "evil.example"}, 403, b"U006"),
        ({"host": ""}, 403, b"U006"),
        ({"origin": "http://evil.example"}, 403, b"U006"),
        ({"content_length": "11"}, 413, b"U007"),
    ],
)
def test_what_may_not_come_in_is_refused(headers: dict[str, Any], status: int, code: bytes) -> None:
    found, body = ask(**headers)
    assert (found, code in body) == (status, True)


def test_a_body_is_limited_whether_its_length_is_known_or_not() -> None:
    assert ask(parts=(b"123456", b"7890")) == (200, b"1234567890")
    assert ask(parts=(b"123456", b"78901"))[0] == 413


def test_probes_need_no_token_and_a_tunnel_may_have_another_port() -> None:
    assert ask("/health", authorization="")[0] == 200
    assert ask("/metrics", authorization="")[0] == 401
    assert ask(host="localhost:9999", origin="http://localhost:9999")[0] == 200


def test_the_command_of_vllm_has_only_documented_options(tmp_path: Path) -> None:
    adapter = tmp_path / "law"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 12}')
    wanted = VllmRequest(folder=tmp_path, name="m", host="127.0.0.1", port=8000, tp=2, pp=2, dtype="bf16",
                         quantise="fp8", max_running=64, adapters={"law": adapter})  # fmt: skip
    options = vllm_options(wanted)
    assert options.keys() <= OPTIONS.keys()
    assert (options["tensor-parallel-size"], options["max-lora-rank"], options["dtype"]) == (2, 16, "bfloat16")
    assert "tensor-parallel-size: 2\n" in plan_vllm(wanted, [])["config_text"]
    with pytest.raises(UserError, match="int4"):
        vllm_options(VllmRequest(folder=tmp_path, name="m", host="h", port=1, quantise="int4"))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match="tokenizer"):
        check_folder(tmp_path)
