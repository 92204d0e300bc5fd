"""The login, the list of runs, and what every page has: themes, languages, widths, keyboard; in a real browser."""

import http.client
import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.runs import finished_run
from tests.web.conftest import OpenPage, WebServer, opening, serving, trimaran, wait_until
from trimaran.runs import RunDirectory

WIDTHS = {"phone": 360, "tablet": 820, "laptop": 1280, "wide": 2560}
PAGES = ("/", "/workshop")


def ask(server: WebServer, path: str, *, method: str = "GET", body: str | None = None, **headers: str) -> Any:
    """Return the server's answer to one request, sent as it is: a client library would tidy up the path."""
    connection = http.client.HTTPConnection(urlsplit(server.base).netloc, timeout=60)
    connection.request(method, path, body=body, headers=headers)
    answer = connection.getresponse()
    answer.text = answer.read().decode(errors="replace")  # type: ignore[attr-defined]
    connection.close()
    return answer


def log_in(server: WebServer) -> str:
    """Return the cookie for the token."""
    answer = ask(server, "/login", method="POST", body=server.token, Origin=server.base)
    assert answer.status == 200
    return answer.headers["set-cookie"].split(";")[0]


def test_the_server_answers_nobody_without_the_token(web_server: WebServer) -> None:
    version = "/_nicegui/3.18.0/static/nicegui.js"
    for path in ("/", "/workshop", version, "/_nicegui_ws/socket.io/?EIO=4&transport=polling", "/_trimaran/web.js"):
        assert ask(web_server, path).status == 401
    assert ask(web_server, "/", Host="evil.example").status == 403
    assert ask(web_server, "/login", method="POST", body="wrong", Origin=web_server.base).status == 401
    assert ask(web_server, "/login", method="POST", body=web_server.token).status == 403
    cookie = log_in(web_server)
    assert ask(web_server, "/", Cookie=cookie).status == 200
    assert ask(web_server, "/", Cookie=cookie, Origin="http://evil.example").status == 403


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/_trimaran/..%2f..%2fsecurity.py", "/docs", "/openapi.json",
                                  "/_trimaran/../server.py", "/runs/..%2f..%2f", "/_trimaran/login.html"])  # fmt: skip
def test_no_file_but_the_pages_own_is_served(web_server: WebServer, path: str) -> None:
    answer = ask(web_server, path, Cookie=log_in(web_server), Accept="text/html")
    assert answer.status in (400, 404, 405, 500) or "W003" in answer.text
    assert "root:" not in answer.text
    assert "import " not in answer.text.split("<script")[0]


def test_a_websocket_of_another_site_is_refused(web_server: WebServer) -> None:
    client = pytest.importorskip("websockets.sync.client")
    exceptions = pytest.importorskip("websockets.exceptions")
    url = web_server.base.replace("http", "ws") + "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    cookie = {"Cookie": log_in(web_server)}
    for origin, headers in (("http://evil.example", cookie), (None, cookie), (web_server.base, {})):
        with pytest.raises(exceptions.InvalidStatus) as caught:  # connects when it is called
            client.connect(url, origin=origin, additional_headers=headers, proxy=None)
        assert caught.value.response.status_code == 403
    with client.connect(url, origin=web_server.base, additional_headers=cookie, proxy=None) as socket:
        assert socket.recv(timeout=60)


def test_the_printed_address_logs_in_and_the_token_leaves_the_address(browser: Any, web_server: WebServer) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(web_server.base)
    page.wait_for_selector("main:not([hidden]) h1")
    assert "terminal" in page.inner_text("h1")
    page.goto(web_server.base + "/#token=wrong")
    page.reload()
    page.wait_for_selector("main:not([hidden]) h1")
    page.goto("about:blank")
    page.goto(web_server.url)
    page.wait_for_selector(".runs")
    assert "token" not in page.url
    assert page.evaluate("document.cookie").find("trimaran-") == -1  # scripts cannot read it
    assert (
        page.evaluate("performance.getEntriesByType('resource').filter((each) => each.name.includes('token')).length")
        == 0
    )
    context.close()


def test_a_real_run_is_listed_searched_and_filtered(open_page: OpenPage, real_run: RunDirectory) -> None:
    page = open_page("/")
    row = page.locator(".runs tbody tr", has_text=real_run.path.name)
    row.wait_for()
    last = json.loads(real_run.metrics.read_text().splitlines()[-1])
    text = row.inner_text()
    assert f"{last['step']:,} / {last['step']:,}" in text
    assert f"{last['loss']:.4g}" in text
    assert "done" in text
    page.fill("input[type=search]", "no such name")
    page.get_by_text("No run matches.").wait_for()
    page.fill("input[type=search]", "TINY")
    row.wait_for()
    page.get_by_role("button", name="Failed").click()
    page.get_by_text("No run matches.").wait_for()
    page.get_by_role("button", name="Done").click()
    row.wait_for()
    assert page.input_value("input[type=search]") == "TINY"  # an update does not change what was typed


def test_a_new_run_appears_by_itself(open_page: OpenPage, web_server: WebServer) -> None:
    page = open_page("/")
    page.wait_for_selector(".runs")
    run = finished_run(web_server.runs / "came-later")
    try:
        row = page.locator(".runs tbody tr", has_text="came-later")
        row.wait_for()
        assert "10 / 10" in row.inner_text()
    finally:
        shutil.rmtree(run.path)
    row.wait_for(state="detached")


@pytest.mark.parametrize("path", PAGES)
def test_pages_fit_every_width_in_both_themes_and_languages(open_page: OpenPage, path: str) -> None:
    for name, width in WIDTHS.items():
        language, scheme = ("zh", "dark") if name in ("phone", "laptop") else ("en", "light")
        page = open_page(path, width=width, language=language, scheme=scheme)
        page.wait_for_selector(".runs, .plans")
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0, (path, name)
        assert page.evaluate("document.documentElement.lang") == language
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 18, 22)"}[scheme]
        page.context.close()


def test_theme_and_language_are_switched_and_remembered(open_page: OpenPage) -> None:
    page = open_page("/")
    ground = "getComputedStyle(document.body).backgroundColor"
    theme = page.locator("[data-action=theme]")
    seen = {theme.inner_text(): page.evaluate(ground)}
    for _ in range(2):
        theme.click()
        seen[theme.inner_text()] = page.evaluate(ground)
    assert seen == {"System": "rgb(255, 255, 255)", "Light": "rgb(255, 255, 255)", "Dark": "rgb(15, 18, 22)"}
    page.locator("[data-action=language]").click()
    wait_until(page, "() => document.documentElement.lang === 'zh'")
    page.wait_for_selector("nav a[aria-current]")
    assert page.inner_text("nav a[aria-current]") == "训练任务"
    assert page.evaluate(ground) == "rgb(15, 18, 22)"


def test_the_keyboard_opens_pages_and_shows_its_shortcuts(open_page: OpenPage) -> None:
    page = open_page("/")
    page.keyboard.press("?")
    page.locator("dialog#shortcuts[open]").wait_for()
    page.keyboard.press("Escape")
    page.locator("dialog#shortcuts[open]").wait_for(state="detached")
    page.keyboard.press("/")
    page.keyboard.type("w")
    assert page.input_value("input[type=search]") == "w"  # a key that is typed is no shortcut
    page.locator("input[type=search]").blur()
    page.keyboard.press("w")
    page.wait_for_url("**/workshop")
    page.wait_for_selector(".page h1")


def test_pages_that_do_not_exist_say_so(browser: Any, web_server: WebServer, logged_in: Any) -> None:
    context = browser.new_context(storage_state=logged_in)
    page = context.new_page()
    answer = page.goto(web_server.base + "/no-such-page")
    assert answer.status == 404
    assert page.inner_text("h1") == "There is no such page"
    context.close()


def test_without_runs_the_page_shows_the_first_command(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with serving(tmp_path / "empty", tmp_path) as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector(".empty")
        with opening(browser, server, context.storage_state()) as open_one:
            page = open_one("/", width=360)
            assert page.locator(".empty pre.command").inner_text() == "trimaran train"
            page.locator(".empty .copied button").click()
            page.get_by_text("Copied").wait_for()
            assert page.evaluate("navigator.clipboard.readText()") == "trimaran train"
        context.close()


@pytest.mark.parametrize(("options", "code"), [(["--runs", "missing"], "W002"), (["--port", "{port}"], "W001")])
def test_mistakes_are_named_with_their_fix(
    options: list[str], code: str, web_server: WebServer, tmp_path: Path
) -> None:
    port = str(urlsplit(web_server.base).port)
    done = trimaran(tmp_path, "ui", "--json", *(each.format(port=port) for each in options), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == code


def test_a_server_is_reached_from_this_machine_only(web_server: WebServer) -> None:
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    port = f"{urlsplit(web_server.base).port:04X}"
    listening = [line.split()[1] for line in lines if line.split()[3] == "0A" and line.split()[1].endswith(f":{port}")]
    assert listening == [f"0100007F:{port}"]
