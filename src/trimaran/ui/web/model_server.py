"""Talks to a server of `trimaran serve`, or another with OpenAI's API, for the chat page. The browser never does."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from trimaran.core import UserError

CONNECT_SECONDS, READ_SECONDS = 5.0, 120.0
MAX_LINE_BYTES = 1 << 20
PREFIX = "trimaran_serve_"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """How an answer is asked for. Temperature 0 always takes the likeliest token."""

    model: str = ""
    system: str = ""
    temperature: float = 0.7
    max_tokens: int = 256

    def body(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system.strip() else []
        return {
            "messages": [*system, *messages],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"model": self.model} if self.model else {})


@dataclass(slots=True)
class Answer:
    """An answer as it arrives: its text, and what it cost. Times are seconds since it was asked for."""

    asked_at: float = field(default_factory=time.monotonic)
    text: str = ""
    first_seconds: float | None = None
    last_seconds: float = 0.0
    num_parts: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish: str = ""

    def add(self, text: str) -> None:
        now = time.monotonic() - self.asked_at
        if text and self.first_seconds is None:
            self.first_seconds = now
        self.text += text
        self.num_parts += bool(text)
        self.last_seconds = now

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second after the first; parts of the stream are counted until the server has said how many."""
        count = self.completion_tokens or self.num_parts
        if self.first_seconds is None or count < 2 or self.last_seconds <= self.first_seconds:
            return None
        return (count - 1) / (self.last_seconds - self.first_seconds)


class ModelServer:
    """One server of a model. Raises UserError W008 for everything that goes wrong with it."""

    def __init__(self, address: str, token: str) -> None:
        self.address = checked_address(address)
        headers = {"Authorization": f"Bearer {token.strip()}"} if token.strip() else {}
        timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        # Proxies of the environment would see the token; a redirect could lead it to another host.
        self._client = httpx.AsyncClient(
            base_url=self.address, headers=headers, timeout=timeout, trust_env=False, follow_redirects=False
        )

    async def models(self) -> list[str]:
        """Return the names of the models that are served."""
        answer = await self._get("/v1/models")
        try:
            return [str(each["id"]) for each in json.loads(answer)["data"]]
        except (ValueError, KeyError, TypeError):
            raise self._failed("this is not a server with OpenAI's API") from None

    async def load(self) -> dict[str, float]:
        """Return the server's own metrics by name, without their prefix; empty if it has none of ours."""
        return parse_metrics(await self._get("/metrics"))

    async def stream(self, answer: Answer, messages: Sequence[Mapping[str, str]], settings: ChatSettings
                     ) -> AsyncIterator[None]:  # fmt: skip
        """Ask for an answer, and yield whenever more of it has arrived."""
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=settings.body(messages)) as response:
                if response.status_code != httpx.codes.OK:
                    raise self._failed(_error_text(await response.aread(), response.status_code))
                async for line in response.aiter_lines():
                    if line.startswith("data:") and take_part(answer, line[5:].strip()):
                        yield
        except httpx.HTTPError as error:
            raise self._failed(_reason(error)) from None

    async def close(self) -> None:
        await self._client.aclose()

    async def _get(self, path: str) -> str:
        try:
            response = await self._client.get(path)
        except httpx.HTTPError as error:
            raise self._failed(_reason(error)) from None
        if response.status_code != httpx.codes.OK:
            raise self._failed(_error_text(response.content, response.status_code))
        return response.text

    def _failed(self, what: str) -> UserError:
        return UserError("W008", f"the model server cannot be used: {what}", where=self.address,
                         fix="start one with `trimaran serve MODEL`, and enter the address and the token that it prints"
                         )  # fmt: skip


def checked_address(address: str) -> str:
    """Return an address without its path; raise UserError if it is none."""
    parts = urlsplit(address.strip() if "://" in address else f"http://{address.strip()}")
    try:
        is_address = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        is_address = False
    if not is_address:
        raise UserError("W008", "this is not the address of a server", where=address[:100] or "the address",
                        fix="enter an address such as http://127.0.0.1:8000")  # fmt: skip
    return f"{parts.scheme}://{parts.netloc}"


def parse_metrics(text: str) -> dict[str, float]:
    """Return the values of a page of Prometheus that have our prefix and no labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name.startswith(PREFIX) and "{" not in name:
            try:
                found[name.removeprefix(PREFIX)] = float(value)
            except ValueError:
                continue
    return found


def take_part(answer: Answer, data: str) -> bool:
    """Add one message of the stream to the answer. Return whether anything has changed."""
    if data == "[DONE]" or len(data) > MAX_LINE_BYTES:
        return False
    try:
        tree = json.loads(data)
        if "error" in tree:
            raise UserError("W008", f"the model server failed: {tree['error'].get('message')}", where="the answer",
                            fix="ask again; the log of the server says more")  # fmt: skip
        if usage := tree.get("usage"):
            answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in tree.get("choices") or ():
            answer.add(choice["delta"].get("content") or "")
            answer.finish = choice.get("finish_reason") or answer.finish
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _error_text(body: bytes, status: int) -> str:
    """Return what an error of OpenAI's form says."""
    try:
        return str(json.loads(body)["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return f"it answers with status {status}"


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
