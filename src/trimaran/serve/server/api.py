"""The routes of the API: what a request asks for becomes requests of the engine, and their outputs an answer."""

import asyncio
import base64
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trimaran.core import UserError, did_you_mean
from trimaran.serve.engine.engine_request import EngineLimits, EngineRequest
from trimaran.serve.server.answer_response import AnswerResponse, PendingAnswer
from trimaran.serve.server.answers import AnswerChoice, AnswerFormat, AnswerHead, ChatFormat, CompletionFormat, usage_of
from trimaran.serve.server.api_error import error_response, json_response, stopping
from trimaran.serve.server.calls import (
    MAX_SEED,
    Call,
    ChatCall,
    CompletionCall,
    EmbeddingCall,
    GenerationFields,
    PreparedPrompt,
    PromptReader,
    longest_prompt,
    may_have_many_values,
    parse_call,
    refuse_many_values,
    schema_of,
)
from trimaran.serve.server.engine_client import EngineClient
from trimaran.serve.server.serving_metrics import ServingMetrics
from trimaran.serve.trained_model import ModelTexts
from trimaran.train import Sampling

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; a chat goes on to the end of the context
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiModel:
    """The name of the model, the names of its adapters, and its texts."""

    name: str
    adapters: tuple[str, ...]
    texts: ModelTexts
    created: int

    def adapter_of(self, asked: str | None) -> str | None:
        """Return the adapter that a request names; None for the model itself. Raises UserError for other names."""
        if asked is None or asked == self.name:
            return None
        if asked in self.adapters:
            return asked
        names = (self.name, *self.adapters)
        raise UserError(
            "U002.no-model-here", where="model", asked=asked, guess=did_you_mean(asked, names), names=", ".join(names)
        )


class OpenAiApi:
    """The endpoints of one served model."""

    def __init__(self, model: ApiModel, reader: PromptReader, client: EngineClient, metrics: ServingMetrics) -> None:
        self._model, self._reader, self._client, self._metrics = model, reader, client, metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self.is_draining = False

    def application(self) -> Starlette:
        """Return the application with all routes. Errors of any kind have OpenAI's form."""
        return Starlette(
            routes=[
                Route("/v1/completions", self._answering(self._complete), methods=["POST"]),
                Route("/v1/chat/completions", self._answering(self._chat), methods=["POST"]),
                Route("/v1/embeddings", self._answering(self._embed), methods=["POST"]),
                Route("/v1/models", self._answering(self._list_models), methods=["GET"]),
                Route("/v1/models/{name:path}", self._answering(self._show_model), methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/ready", self._ready, methods=["GET"]),
                Route("/metrics", self._show_metrics, methods=["GET"]),
            ],
            exception_handlers={404: self._unknown_path, 405: self._wrong_method},
        )

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _answering(self, handle: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Return an endpoint that answers a UserError with its status, and counts answers."""

        async def endpoint(request: Request) -> Response:
            try:
                response = await handle(request)
            except UserError as error:
                self._metrics.observe_error(error.code)
                response = error_response(error)
            if isinstance(response, AnswerResponse):
                return response.counted(request.url.path)
            self._metrics.observe_answer(request.scope["route"].path, response.status_code)
            return response

        return endpoint

    async def _complete(self, request: Request) -> Response:
        call = await self._parsed(CompletionCall, request)
        adapter, limits = self._model.adapter_of(call.model), self._limits()
        self._client.check_count(len(call.prompts) * (call.n or 1))
        prompts = await self._read_texts(call.prompts, limits, where="prompt")
        wants, tokenizer = call.logprobs is not None, self._model.texts.tokenizer
        template = EngineRequest(
            id="", prompt=(), sampling=_sampling(call), adapter=adapter, logprobs=call.logprobs,
            max_tokens=call.max_tokens or DEFAULT_COMPLETION_TOKENS, grammar=schema_of(call.response_format),
            prompt_logprobs=bool(call.echo) and wants,
        )  # fmt: skip
        head = AnswerHead(model=call.model or self._model.name, prefix="cmpl")
        echoes = [tokenizer.decode(prompt.ids) if call.echo else "" for prompt in prompts]
        return self._answer(
            call, template, prompts, CompletionFormat(head, tokenizer, call.n or 1, wants), echoes, records=wants
        )

    async def _chat(self, request: Request) -> Response:
        call = await self._parsed(ChatCall, request)
        adapter, limits = self._model.adapter_of(call.model), self._limits()
        if call.top_logprobs and not call.logprobs:
            raise UserError("U001.top-logprobs", where="top_logprobs")
        self._client.check_count(call.n or 1)
        texts: list[str] = []
        for each in call.messages:
            texts += [each.content] if isinstance(each.content, str) else [part.text or "" for part in each.content]
        await self._in_thread(partial(self._reader.refuse_much_too_long, texts, limits, where="messages"))
        prompt = await self._in_thread(lambda: self._reader.read_chat(call.messages))
        _refuse_long(prompt, limits)
        longest = max(1, limits.max_length - len(prompt.ids))
        template = EngineRequest(
            id="", prompt=(), sampling=_sampling(call), adapter=adapter, grammar=schema_of(call.response_format),
            max_tokens=call.max_completion_tokens or call.max_tokens or longest,
            logprobs=(call.top_logprobs or 0) if call.logprobs else None,
        )  # fmt: skip
        head, wants = AnswerHead(model=call.model or self._model.name, prefix="chatcmpl"), bool(call.logprobs)
        shape = ChatFormat(head, self._model.texts.tokenizer, wants)
        return self._answer(call, template, [prompt], shape, [""], records=wants)

    async def _embed(self, request: Request) -> Response:
        call = await self._parsed(EmbeddingCall, request)
        adapter, limits = self._model.adapter_of(call.model), self._limits()
        if call.dimensions is not None:
            raise UserError("U001.dimensions-not-supported", where="dimensions")
        self._client.check_count(len(call.inputs))
        prompts = await self._read_texts(call.inputs, limits, where="input")
        requests = [
            EngineRequest(id=secrets.token_hex(8), prompt=prompt.ids, sampling=Sampling(), max_tokens=1,
                          adapter=adapter, embed=True)
            for prompt in prompts
        ]  # fmt: skip
        choices = [AnswerChoice(prompt, self._model.texts.tokenizer, (), records=False) for prompt in prompts]
        shape = _EmbeddingFormat(call.model or self._model.name, call.encoding_format)
        return AnswerResponse(self._pending(requests, choices, shape), stream=False)

    async def _parsed(self, kind: type[Call], request: Request) -> Call:
        """Return the fields of a request. Its body is parsed in the event loop, so it may not have too many values."""
        body = await request.body()
        if may_have_many_values(body):
            await asyncio.to_thread(refuse_many_values, body)
        return parse_call(kind, body)

    async def _read_texts(
        self, prompts: Sequence[str | Sequence[int]], limits: EngineLimits, *, where: str
    ) -> list[PreparedPrompt]:
        """Return the prompts of a call. They are tokenised one by one, so that other calls take turns."""
        found = []
        for prompt in prompts:
            if isinstance(prompt, str):
                await self._in_thread(partial(self._reader.refuse_much_too_long, [prompt], limits, where=where))
            read = partial(self._reader.read_text, prompt, vocabulary=limits.vocabulary, where=where)
            found.append(await self._in_thread(read))
            _refuse_long(found[-1], limits)
        return found

    def _answer(
        self,
        call: GenerationFields,
        template: EngineRequest,
        prompts: Sequence[PreparedPrompt],
        shape: AnswerFormat,
        echoes: Sequence[str],
        *,
        records: bool,
    ) -> Response:
        """Return the answers to the prompts of a call. Each of several to one prompt has its own seed."""
        requests, choices = [], []
        for prompt, echo in zip(prompts, echoes, strict=True):
            stop_ids = frozenset() if call.ignore_eos else prompt.stop_ids
            for number in range(call.n or 1):
                seed = (template.sampling.seed + number) % (MAX_SEED + 1)
                requests.append(replace(template, id=secrets.token_hex(8), prompt=prompt.ids, images=prompt.images,
                                        stop_ids=stop_ids, sampling=replace(template.sampling, seed=seed)))  # fmt: skip
                choices.append(
                    AnswerChoice(prompt, self._model.texts.tokenizer, call.stops, echo=echo, records=records)
                )
        usage = call.stream_options is not None and call.stream_options.include_usage
        return AnswerResponse(self._pending(requests, choices, shape), stream=bool(call.stream), include_usage=usage)

    def _pending(self, requests: Sequence[EngineRequest], choices: Sequence[AnswerChoice], shape: Any) -> PendingAnswer:
        adapter = requests[0].adapter if requests else None

        def fingerprint(weights: str) -> str:
            return f"{self._model.name}@{weights}" + (f"+{adapter}" if adapter else "")

        return PendingAnswer(
            client=self._client,
            metrics=self._metrics,
            ticket=self._client.submit(requests),
            choices=choices,
            format=shape,
            fingerprint=fingerprint,
        )

    def _limits(self) -> EngineLimits:
        """Return what the engine takes. Raises UserError if the server starts or stops."""
        if self.is_draining:
            raise stopping()
        if self._client.limits is None:
            raise UserError("U009.engine-not-ready", where="the server")
        return self._client.limits

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _list_models(self, _: Request) -> Response:
        names = (self._model.name, *self._model.adapters)
        return json_response({"object": "list", "data": [self._model_body(name) for name in names]})

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._model.adapter_of(name)
        return json_response(self._model_body(name))

    def _model_body(self, name: str) -> dict[str, Any]:
        body = {"id": name, "object": "model", "created": self._model.created, "owned_by": "trimaran"}
        parent = None if name == self._model.name else self._model.name
        length = self._client.limits.max_length if self._client.limits else None
        return body | {"parent": parent, "max_model_len": length, "weights": self._client.weights.label}

    async def _health(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        is_ready = self._client.is_ready and not self.is_draining
        state = "ready" if is_ready else "draining" if self.is_draining else "starting"
        return json_response({"status": state}, status=200 if is_ready else 503)

    async def _show_metrics(self, _: Request) -> Response:
        self._client.measure()
        return Response(self._metrics.text(), media_type=METRICS_TYPE)

    async def _unknown_path(self, request: Request, _: Exception) -> Response:
        paths = "/v1/completions, /v1/chat/completions, /v1/embeddings or /v1/models"
        return error_response(UserError("U016.no-here", where="the path", url=request.url.path, paths=paths))

    async def _wrong_method(self, request: Request, _: Exception) -> Response:
        return error_response(
            UserError("U017.not-take", where="the method", url=request.url.path, method=request.method)
        )


@dataclass(frozen=True, slots=True)
class _EmbeddingFormat:
    model: str
    encoding: str

    def whole(self, choices: Sequence[AnswerChoice], weights: str) -> dict[str, Any]:
        def encoded(values: Sequence[float]) -> Any:
            if self.encoding == "float":
                return list(values)
            return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()

        rows = [
            {"object": "embedding", "index": number, "embedding": encoded(choice.embedding or ())}
            for number, choice in enumerate(choices)
        ]
        usage = usage_of(choices)
        del usage["completion_tokens"]
        return {"object": "list", "data": rows, "model": self.model, "usage": usage, "system_fingerprint": weights}


def _sampling(call: GenerationFields) -> Sampling:
    """Return how tokens are chosen. Without a seed every request has its own."""
    return Sampling(
        temperature=1.0 if call.temperature is None else call.temperature,
        top_p=1.0 if call.top_p is None else call.top_p,
        top_k=max(0, call.top_k or 0),
        seed=secrets.randbits(63) if call.seed is None else call.seed,
    )


def _refuse_long(prompt: PreparedPrompt, limits: EngineLimits) -> None:
    """Raise if the engine could never run the prompt: the model has too few positions, or the cache too few pages."""
    longest = longest_prompt(limits)
    if len(prompt.ids) > longest:
        raise UserError("U003.prompt-tokens-most", where="the prompt", num_ids=len(prompt.ids), longest=longest)
