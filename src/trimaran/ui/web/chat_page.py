"""A page to talk to a served model, with what it costs: tokens a second, cache use, queue."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
from nicegui import Client, background_tasks, ui
from nicegui.elements.mixins.text_element import TextElement
from nicegui.events import GenericEventArguments

from trimaran.core import UserError, show_count
from trimaran.ui.language import Language, current_language, say, speaking
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.web.controls import button, choice, slider, text_field
from trimaran.ui.web.frame import Markup, WebState, empty_state, error_state, page_frame

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


DEFAULT_ADDRESS = "http://127.0.0.1:8000"
TEMPERATURES = ("0", "0.2", "0.5", "0.7", "0.9", "1", "1.2", "1.5")
LENGTHS = ("16", "64", "128", "256", "512", "1024", "2048", "4096")
LOAD_SECONDS = 1.0  # between two reads of the server's metrics
DRAW_SECONDS = 0.1  # between two updates of an answer that arrives
MAX_MESSAGE = 100_000  # characters


class ChatPage:
    """One open page: the server, the conversation, and the answer that arrives."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self.address, self.token, self.draft = DEFAULT_ADDRESS, "", ""
        self.settings = ChatSettings()
        self.server: ModelServer | None = None
        self.messages: list[dict[str, str]] = []
        self.answer: Answer | None = None
        self._last: Answer | None = None  # the answer whose costs are shown
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def build(self) -> None:
        with ui.element("div").classes("workshop chat"):
            with ui.element("div").classes("panel"):
                _entered(say("Address of the server"), partial(setattr, self, "address"), value=self.address)
                _entered(say("Token"), partial(setattr, self, "token"), is_secret=True)
                button(say("Connect"), self._connect, is_main=True)
                self._models = ui.element("div")
                _entered(say("System prompt"), lambda text: self._set(system=text[:MAX_MESSAGE]))
                slider(say("Temperature"), TEMPERATURES, lambda text: self._set(temperature=float(text)), value="0.7")
                slider(say("Tokens of an answer"), LENGTHS, lambda text: self._set(max_tokens=int(text)), value="256")
            with ui.element("div").classes("answer"):
                self._costs = Markup(costs_markup(None, {})).props("aria-live=off")
                self._error = Markup()
                hint = empty_state(say("Connect to a model server to talk to it."), "trimaran serve runs/my-run")
                self._talk = Markup(hint).classes("talk").props("aria-live=polite")
                with ui.element("div").classes("ask"):
                    self._field = ui.element("div")
                    self._send = button(say("Send"), self._ask, is_main=True)
                    self._stop = button(say("Stop"), self._stop_answer)
                    button(say("New conversation"), self._forget)
        self._build_field()
        self._show_buttons()
        ui.timer(LOAD_SECONDS, self._refresh_load)

    def _build_field(self) -> None:
        """Add an empty field for a message: a browser keeps what was entered in the one before."""

        async def enter(event: GenericEventArguments) -> None:
            self._type(event)
            await self._ask()

        self._field.clear()
        with self._field, speaking(self.language):
            label = say("Message")
            field = TextElement(tag="textarea", text="")
            field.props["aria-label"], field.props["placeholder"], field.props["rows"] = label, label, 3
            field.on("change", self._type, ["value"])
            field.on("keydown.enter.exact.prevent", enter, ["value"])

    def _type(self, event: GenericEventArguments) -> None:
        self.draft = str(event.args.get("value", ""))[:MAX_MESSAGE]

    def _set(self, **settings: Any) -> None:
        self.settings = replace(self.settings, **settings)

    async def _connect(self) -> None:
        """Use the server that was entered, and list its models."""
        await self._disconnect()
        self._error.show(Html(""))
        try:
            server = ModelServer(self.address, self.token)
            names = await server.models()
        except UserError as error:
            self._show_error(error)
            return
        self.server = server
        self.settings = replace(self.settings, model=names[0] if names else "")
        self._models.clear()
        with self._models, speaking(self.language):
            choice(say("Model"), {name: name for name in names}, lambda text: self._set(model=text),
                   value=self.settings.model)  # fmt: skip
        self._draw()
        await self._refresh_load()

    async def _ask(self) -> None:
        """Send the message, and show the answer as it arrives."""
        if self.server is None:
            await self._connect()
        text, server = self.draft.strip(), self.server
        if server is None or not text or (self._task is not None and not self._task.done()):
            return
        self.messages.append({"role": "user", "content": text})
        self.draft, self.answer = "", Answer()
        self._error.show(Html(""))
        self._build_field()
        self._task = background_tasks.create(self._receive(server, self.answer), name="answer")
        self._show_buttons()

    async def _receive(self, server: ModelServer, answer: Answer) -> None:
        drawn = 0.0
        try:
            async for _ in server.stream(answer, tuple(self.messages), self.settings):
                if time.monotonic() - drawn >= DRAW_SECONDS:
                    self._draw()
                    drawn = time.monotonic()
        except UserError as error:
            self._show_error(error)
        finally:
            if self.answer is answer:  # the conversation has not been forgotten
                self.messages.append({"role": "assistant", "content": answer.text})
                self.answer, self._last = None, answer
            self._task = None
            if not self._is_closed:
                self._show_buttons()

    def _stop_answer(self) -> None:
        """End the answer: the connection is closed, and the server frees what the request used."""
        if self._task is not None:
            self._task.cancel()

    def _forget(self) -> None:
        self._stop_answer()
        self.messages, self.answer, self._last = [], None, None
        self._draw()

    async def _refresh_load(self) -> None:
        load: Mapping[str, float] = {}
        if self.server is not None:
            try:
                load = await self.server.load()
            except UserError:  # shown when the user asks for something
                load = {}
        with speaking(self.language):
            self._costs.show(costs_markup(self.answer or self._last, load))

    def _draw(self) -> None:
        with speaking(self.language):
            arriving = [{"role": "assistant", "content": self.answer.text}] if self.answer is not None else []
            hint = say("Ask something.") if self.server is not None else say("Connect to a model server to talk to it.")
            self._talk.show(talk_markup([*self.messages, *arriving]) or empty_state(hint))

    def _show_error(self, error: UserError) -> None:
        with speaking(self.language):
            self._error.show(error_state(error))

    def _show_buttons(self) -> None:
        is_busy = self._task is not None
        self._send.props["disabled"] = is_busy
        self._stop.set_visibility(is_busy)
        self._draw()

    async def close(self) -> None:
        """End what the page does: the browser has left it."""
        self._is_closed = True
        await self._disconnect()

    async def _disconnect(self) -> None:
        self._stop_answer()
        if (server := self.server) is not None:
            self.server = None
            await server.close()


def _entered(label: str, on_change: Callable[[str], None], *, value: str = "", is_secret: bool = False) -> None:
    """Add a field for text whose last value arrives before a click elsewhere: typing alone is sent after a pause."""
    field = text_field(label, on_change, value=value, is_secret=is_secret)
    field.on("change", lambda event: on_change(str(event.args.get("value", ""))), ["value"])


def add_page(state: WebState) -> None:
    """Register the chat at `/chat`."""

    @ui.page("/chat")
    def chat(client: Client) -> None:
        page = ChatPage(current_language())
        with page_frame(say("Chat"), active="/chat"):
            Markup(tag("h1", None, say("Talk to a model")))
            page.build()
        client.on_delete(page.close)


def talk_markup(messages: list[dict[str, str]]) -> Html:
    """Return the conversation. Texts are escaped: a model can write anything."""
    names = {"user": say("You"), "assistant": say("Model")}
    rows = [
        tag("article", {"class": f"message {each['role']}"},
            tag("h3", None, names[each["role"]]), tag("p", None, each["content"] or "\u2026"))
        for each in messages
    ]  # fmt: skip
    return Html("".join(rows))


def costs_markup(answer: Answer | None, load: Mapping[str, float]) -> Html:
    """Return tiles with what the last answer cost, and how busy the server is."""
    rate = answer.tokens_per_second if answer else None
    first = answer.first_seconds if answer else None
    tokens = answer.completion_tokens if answer else None
    prompt = answer.prompt_tokens if answer else None
    pages, used, generated = (load.get(name) for name in ("pages", "used_pages", "generated_tokens_total"))
    requests = [load[name] for name in ("running_requests", "waiting_requests") if name in load]
    queue = " + ".join(f"{each:.0f}" for each in requests)
    shown = {
        "first-token": (say("time to first token"), "" if first is None else f"{first * 1000:,.0f} ms"),
        "rate": (say("tokens per second"), "" if rate is None else f"{rate:,.1f}"),
        "tokens": (say("tokens: question + answer"), "" if tokens is None else f"{prompt:,} + {tokens:,}"),
        "queue": (say("requests: running + waiting"), queue if len(requests) == 2 else ""),
        "cache": (say("cache in use"), "" if not pages or used is None else f"{used / pages:.0%}"),
        "generated": (say("tokens of all users"), "" if generated is None else show_count(generated)),
    }
    tiles = [
        tag("div", {"class": "tile", "data-cost": name}, tag("span", None, label), tag("b", None, value or "\u2013"))
        for name, (label, value) in shown.items()
    ]
    return tag("div", {"class": "tiles"}, *tiles)
