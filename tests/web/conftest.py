"""A real server, a real run and a real browser for the tests of the web page.

`web_server` is `trimaran ui` in a process of its own, over a folder with `real_run`, which the trainer has made.
`open_page` opens an address in Debian's chromium, logged in. After each test the browser must have reported no
error, and must have asked for nothing outside of the server.
"""

import json
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests import forked
from tests.cpu_rates import give_cpu_rates
from tests.environment import environment
from trimaran.runs import RunDirectory

ROOT = Path(__file__).parents[2]
START_SECONDS = 120  # of a process on a busy machine
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT_MILLISECONDS = 60_000
STEPS = 12


@dataclass(frozen=True, slots=True)
class WebServer:
    """A running `trimaran ui`: its address, the token, and the folder of its runs."""

    base: str
    token: str
    runs: Path
    process: forked.Forked

    @property
    def url(self) -> str:
        return f"{self.base}/#token={self.token}"


@dataclass(slots=True)
class BrowserLog:
    """What the browser reported, and what it asked for outside of the server."""

    base: str
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def is_own(self, url: str) -> bool:
        parts, own = urlsplit(url), urlsplit(self.base)
        return parts.scheme in ("data", "blob", "about") or parts.netloc == own.netloc


def trimaran(folder: Path, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in `user_environment`."""
    return forked.run("trimaran", *words, cwd=cwd, env=user_environment(folder), timeout=300)


def user_environment(folder: Path) -> dict[str, str]:
    """Return an environment in which commands keep caches and states to the test."""
    own = environment(TRIMARAN_CACHE=str(folder / "cache"), XDG_STATE_HOME=str(folder / "state"))
    return {name: value for name, value in own.items() if not name.startswith("NICEGUI_")}


@contextmanager
def serving(runs: Path, folder: Path, *options: str) -> Iterator[WebServer]:
    """Start `trimaran ui` for the runs, and end it after the block with Ctrl-C."""
    pytest.importorskip("nicegui")
    words = ("ui", "--runs", str(runs), "--no-open", "--json", *options)
    own = user_environment(folder) | {"XDG_CONFIG_HOME": str(folder / "config")}
    with (folder / "ui.log").open("w") as log:
        process = forked.start("trimaran", *words, cwd=ROOT, env=own, stderr=log)
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
        line = process.stdout.readline() if ready else ""
        assert line, (folder / "ui.log").read_text()
        base, _, token = json.loads(line)["url"].partition("/#token=")
        yield WebServer(base, token, runs, process)
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def web_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("web")
    give_cpu_rates(folder / "cache")
    return folder


@pytest.fixture(scope="session")
def real_run(web_folder: Path) -> RunDirectory:
    """A finished run that the trainer has made: a few steps of the tiny recipe on two ranks."""
    path = web_folder / "runs" / "tiny-run"
    settings = ("cluster=2xcpu", f"train.steps={STEPS}", "train.global_batch=8", "data.seq_len=64")
    done = trimaran(web_folder, "train", "recipes/stdlib-tiny.yaml", "--warm", f"--run-dir={path}", "--quiet",
                    "--no-check", *(f"--set={each}" for each in settings))  # fmt: skip
    assert done.returncode == 0, done.stderr
    return RunDirectory(path)


@pytest.fixture(scope="session")
def web_server(web_folder: Path, real_run: RunDirectory) -> Iterator[WebServer]:
    with serving(real_run.path.parent, web_folder) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, driven by playwright.

    It is closed at the end of a module: while playwright is open, `asyncio.run` fails in this process.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if BROWSER is None:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def logged_in(browser: Any, web_server: WebServer) -> Any:
    """The cookies of a browser that has opened the printed address."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(web_server.url)
    page.wait_for_selector(".page h1", timeout=WAIT_MILLISECONDS)
    state = context.storage_state()
    context.close()
    return state


OpenPage = Callable[..., Any]


def wait_until(page: Any, condition: str, arg: object = None) -> None:
    """Wait until a JavaScript function returns true.

    Playwright's own `wait_for_function` calls `eval` in the page, which the content policy refuses.
    """
    deadline = time.monotonic() + WAIT_MILLISECONDS / 1000
    while not page.evaluate(condition, arg):
        assert time.monotonic() < deadline, f"{condition} {arg}: {page.inner_text('body')[:2000]}"
        time.sleep(0.05)


@contextmanager
def opening(browser: Any, server: WebServer, state: Any) -> Iterator[OpenPage]:
    """Yield a function that opens an address of the server, and check at the end what the browser has reported."""
    log, contexts = BrowserLog(server.base), []

    def answer(route: Any) -> None:
        if log.is_own(route.request.url):
            route.continue_()
        else:
            log.outside.append(route.request.url)
            route.abort()

    def open_page(path: str = "/", *, width: int = 1280, height: int = 900, language: str = "en",
                  scheme: str = "light", cookies: Sequence[Any] = ()) -> Any:  # fmt: skip
        locale = {"en": "en-GB", "zh": "zh-CN"}[language]
        context = browser.new_context(storage_state=state, viewport={"width": width, "height": height}, locale=locale,
                                      color_scheme=scheme, permissions=["clipboard-read"])  # fmt: skip
        contexts.append(context)
        context.set_default_timeout(WAIT_MILLISECONDS)
        context.add_cookies(list(cookies))
        context.route("**/*", answer)
        page = context.new_page()
        page.on("console", lambda each: log.errors.append(each.text) if each.type == "error" else None)
        page.on("pageerror", lambda each: log.errors.append(str(each)))
        page.on("websocket", lambda each: log.outside.append(each.url) if not log.is_own(each.url) else None)
        page.goto(server.base + path)
        page.wait_for_selector(".page h1")
        wait_until(page, "() => window.did_handshake === true")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert log.errors == []
    assert log.outside == []


@pytest.fixture
def open_page(browser: Any, web_server: WebServer, logged_in: Any) -> Iterator[OpenPage]:
    with opening(browser, web_server, logged_in) as open_one:
        yield open_one
