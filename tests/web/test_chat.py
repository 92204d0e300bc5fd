"""The chat page in a real browser, with a real `trimaran serve`: answers stream, and the page shows what they cost."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import TOKEN, RunningServer, running_server, save_tiny_model
from tests.web.conftest import OpenPage, wait_until

WIDTHS = (360, 1280)


@pytest.fixture(scope="module")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("served")
    model = save_tiny_model(folder / "tiny")
    with running_server(model, log=folder / "serve.log") as server:
        yield server


def connect(page: Any, address: str, token: str = TOKEN) -> None:
    page.get_by_label("Address of the server").fill(address)
    page.get_by_label("Token", exact=True).fill(token)
    page.get_by_role("button", name="Connect").click()


def cost(page: Any, name: str) -> str:
    return page.locator(f"[data-cost={name}] b").inner_text()


@pytest.mark.slow
def test_an_answer_streams_and_shows_what_it_costs(open_page: OpenPage, model_server: RunningServer) -> None:
    page = open_page("/chat")
    connect(page, model_server.url)
    page.get_by_text("Ask something.").wait_for()
    assert page.get_by_label("Model", exact=True).input_value() == "tiny"
    page.get_by_role("slider", name="Temperature").fill("0")
    page.get_by_role("slider", name="Tokens of an answer").fill("1")
    page.get_by_label("Message").fill("Hello <b>there</b>")
    page.get_by_label("Message").press("Enter")
    question = page.locator(".message.user p")
    question.wait_for()
    assert question.inner_text() == "Hello <b>there</b>"  # text, and not markup
    assert page.get_by_label("Message").input_value() == ""
    wait_until(page, "() => document.querySelector('[data-cost=tokens] b').textContent.includes('+ 64')")
    assert page.locator(".message.assistant p").inner_text().strip()
    assert cost(page, "first-token").endswith("ms")
    assert float(cost(page, "rate").replace(",", "")) > 0
    wait_until(page, "() => document.querySelector('[data-cost=queue] b').textContent === '0 + 0'")
    assert cost(page, "cache").endswith("%")
    page.get_by_label("Message").fill("And then?")
    page.get_by_role("button", name="Send").click()
    wait_until(page, "() => document.querySelectorAll('.message.assistant').length === 2")
    page.get_by_role("button", name="New conversation").click()
    page.locator(".message").first.wait_for(state="detached")


@pytest.mark.slow
def test_an_answer_can_be_stopped_and_the_server_forgets_it(open_page: OpenPage, model_server: RunningServer) -> None:
    page = open_page("/chat")
    connect(page, model_server.url)
    page.get_by_text("Ask something.").wait_for()
    page.get_by_role("slider", name="Temperature").fill("0")
    page.get_by_role("slider", name="Tokens of an answer").fill("7")
    page.get_by_label("Message").fill("Hello <b>there</b>")  # the model repeats itself, and never ends
    page.get_by_label("Message").press("Enter")
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Stop").wait_for(state="hidden")
    wait_until(page, "() => document.querySelector('[data-cost=queue] b').textContent === '0 + 0'")


@pytest.mark.slow
def test_a_wrong_token_is_named(open_page: OpenPage, model_server: RunningServer) -> None:
    page = open_page("/chat")
    connect(page, model_server.url, token="wrong")
    page.get_by_text("W008").wait_for()
    assert "token" in page.locator(".fault").inner_text()


def test_mistakes_are_shown_with_their_fix(open_page: OpenPage) -> None:
    page = open_page("/chat")
    with socket.socket() as unused:  # bound, but nobody listens
        unused.bind(("127.0.0.1", 0))
        connect(page, f"http://127.0.0.1:{unused.getsockname()[1]}")
        page.get_by_text("W008").wait_for()
    assert "trimaran serve" in page.locator(".fault").inner_text()
    connect(page, "file:///etc/passwd")
    page.get_by_text("this is not the address of a server").wait_for()


def test_the_page_fits_a_phone_in_chinese_and_dark(open_page: OpenPage) -> None:
    for width in WIDTHS:
        page = open_page("/chat", width=width, language="zh", scheme="dark")
        assert page.inner_text("h1") == "与模型对话"
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 22)"
