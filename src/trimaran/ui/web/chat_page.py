"""A page to talk to a served model, with what it costs: tokens a second, cache use, queue."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from nicegui import Client, background_tasks, ui
from nicegui.elements.mixins.text_element import TextElement
from nicegui.events import GenericEventArguments

from trimaran.core import UserError, show_count
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.web.controls import button, choice, slider, text_field
from trimaran.ui.web.frame import Markup, empty_state, error_state, page_frame
from trimaran.ui.web.language import Language, current_language, say, speaking
from trimaran.ui.web.model_server import Answer, ChatSettings, ModelServer
from trimaran.ui.web.web_state import WebState

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
                _entered(say("Address of the server"), self._set_address, value=self.address)
                _entered(say("Token"), self._set_token, is_secret=True)
                button(say("Connect"), self._connect, is_main=True)
                self._models = ui.element("div")
                _entered(say("System prompt"), self._set_system)
                slider(say("Temperature"), TEMPERATURES, self._set_temperature, value="0.7")
                slider(say("Tokens of an answer"), LENGTHS, self._set_length, value="256")
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
        self._field.clear()
        with self._field, speaking(self.language):
            label = say("Message")
            field = TextElement(tag="textarea", text="")
            field.props["aria-label"], field.props["placeholder"], field.props["rows"] = label, label, 3
            field.on("change", self._type, ["value"])
            field.on("keydown.enter.exact.prevent", self._enter, ["value"])

    def _type(self, event: GenericEventArguments) -> None:
        self.draft = str(event.args.get("value", ""))[:MAX_MESSAGE]

    async def _enter(self, event: GenericEventArguments) -> None:
        self._type(event)
        await self._ask()

    def _set_address(self, text: str) -> None:
        self.address = text

    def _set_token(self, text: str) -> None:
        self.token = text

    def _set_system(self, text: str) -> None:
        self.settings = replace(self.settings, system=text[:MAX_MESSAGE])

    def _set_temperature(self, text: str) -> None:
        self.settings = replace(self.settings, temperature=float(text))

    def _set_length(self, text: str) -> None:
        self.settings = replace(self.settings, max_tokens=int(text))

    def _set_model(self, text: str) -> None:
        self.settings = replace(self.settings, model=text)

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
            choice(say("Model"), {name: name for name in names}, self._set_model, value=self.settings.model)
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
    pages, used = load.get("pages"), load.get("used_pages")
    shown = {
        "first-token": (say("time to first token"), "" if first is None else f"{first * 1000:,.0f} ms"),
        "rate": (say("tokens per second"), "" if rate is None else f"{rate:,.1f}"),
        "tokens": (say("tokens: question + answer"), "" if tokens is None else f"{prompt:,} + {tokens:,}"),
        "queue": (say("requests: running + waiting"), _pair(load, "running_requests", "waiting_requests")),
        "cache": (say("cache in use"), "" if not pages or used is None else f"{used / pages:.0%}"),
        "generated": (say("tokens of all users"), _count(load.get("generated_tokens_total"))),
    }
    tiles = [
        tag("div", {"class": "tile", "data-cost": name}, tag("span", None, label), tag("b", None, value or "\u2013"))
        for name, (label, value) in shown.items()
    ]
    return tag("div", {"class": "tiles"}, *tiles)


def _pair(load: Mapping[str, float], one: str, other: str) -> str:
    return f"{load[one]:.0f} + {load[other]:.0f}" if one in load and other in load else ""


def _count(value: float | None) -> str:
    return "" if value is None else show_count(value)
