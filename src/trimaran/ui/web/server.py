"""Builds the application of the web page and serves it on this machine until it is interrupted."""

import logging
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from nicegui import app as nicegui_app
from nicegui import run, ui

from trimaran.core import UserError
from trimaran.serve import ConnectionGuard, guarded_http, limits_of_process, listen, status_of
from trimaran.ui.language import LANGUAGE_COOKIE, language_of, say, speaking
from trimaran.ui.report.markup import html_document, tag
from trimaran.ui.web import compare_page, home_page, run_page, views_page, workshop_page
from trimaran.ui.web.frame import ASSET_PATH, ASSETS, LOGO, Markup, WebState, asset, error_state, page_frame
from trimaran.ui.web.security import Application, Credentials, SecurityMiddleware

LOOPBACK = "127.0.0.1"
TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
RECONNECT_SECONDS = 20.0  # how long the server keeps a page that has lost its connection
PAGES = (home_page, run_page, compare_page, views_page, workshop_page)


def build_app(state: WebState, credentials: Credentials) -> SecurityMiddleware:
    """Return the application with all pages, behind the checks of `SecurityMiddleware`. Call it once in a process."""
    outer = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    nicegui_app.state.trimaran_language = state.language  # of pages without a cookie; None: the browser's
    outer.add_api_route(f"{ASSET_PATH}{{name}}", _serve_asset, methods=["GET"])
    for page in PAGES:
        page.add_page(state)
    nicegui_app.on_page_exception(_show_page_error)
    nicegui_app.exception_handler(404)(_not_found)
    run.process_pool_start_method = "spawn"  # the server has threads, which a fork would copy in any state
    # Pages that do not exist and users' mistakes are no faults to write to the terminal.
    log = logging.getLogger("nicegui")
    log.setLevel(logging.ERROR)
    log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], UserError)))
    ui.run_with(
        outer,
        title="Trimaran",
        favicon=LOGO,
        dark=None,
        tailwind=False,
        gzip_middleware_factory=None,
        binding_refresh_interval=None,
        reconnect_timeout=RECONNECT_SECONDS,
        show_welcome_message=False,
    )
    return SecurityMiddleware(outer, credentials)


def bind(port: int) -> socket.socket:
    """Return a socket on the loopback interface; 0 is any free port. Raise UserError if the port cannot be used."""
    return listen(LOOPBACK, port, "leave --port out to get a free one, or name another")


def serve(state: WebState, listening: socket.socket, on_start: Callable[[str], None]) -> None:
    """Serve the pages until the process is interrupted. `on_start` gets the address when it can be opened."""
    credentials = Credentials(listening.getsockname()[1])
    server = uvicorn.Server(http_config(build_app(state, credentials), ConnectionGuard(limits_of_process(), refusal)))
    nicegui_app.on_startup(lambda: on_start(credentials.url))
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listening])


def http_config(application: Application, guard: ConnectionGuard) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=guarded_http(guard),
        h11_max_incomplete_event_size=guard.limits.h11_bytes,
        access_log=False,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        ws_max_size=1 << 20,
    )


def refusal(error: UserError) -> Response:
    return Response(f"{error.code}: {error.what}\n", status_code=status_of(error), media_type="text/plain")


def open_browser(url: str) -> None:
    """Open the address in the user's browser, if there is one.

    Arguments of processes can be read by every user of a machine. The browser is therefore given a file that only its
    owner can read, and which leads to the address with its token.
    """
    with suppress(webbrowser.Error, OSError):
        browser = webbrowser.get()
        with tempfile.NamedTemporaryFile("w", suffix=".html", prefix="trimaran-", delete=False) as file:
            file.write(f'<!doctype html><meta charset="utf-8"><script>location.replace({url!r})</script>\n')
        path = Path(file.name)

        def show() -> None:
            browser.open(path.as_uri())
            threading.Event().wait(30.0)  # until the browser has read it
            path.unlink(missing_ok=True)

        threading.Thread(target=show, daemon=True).start()


def _serve_asset(name: str) -> Response:
    if name not in ASSETS:
        return Response("there is no such file\n", status_code=404, media_type="text/plain")
    headers = {"cache-control": "private, max-age=31536000, immutable"}
    return Response(asset(name), media_type=TYPES[name.rpartition(".")[2]], headers=headers)


def _show_page_error(error: Exception) -> None:
    """Show a mistake as a page; a fault of ours is shown without its details, which are in the terminal."""
    with page_frame(say("Error"), active=""):
        if isinstance(error, UserError):
            Markup(error_state(error))
            return
        logging.getLogger(__name__).error("a page could not be built", exc_info=error)
        fault = UserError("W005", say("this page could not be built: {kind}", kind=type(error).__name__),
                          where=say("the terminal of `trimaran ui` shows where"),
                          fix=say("reload the page; if it stays, report it with that text"))  # fmt: skip
        Markup(error_state(fault))


def _not_found(request: Request, _: Exception) -> Response:
    language = language_of(request.cookies.get(LANGUAGE_COOKIE), request.headers.get("accept-language", ""))
    with speaking(language):
        title = say("There is no such page")
        back = tag("p", None, tag("a", {"href": "/"}, say("Back to the list of runs")))
    page = html_document(title, [tag("h1", None, title), back])
    return Response(page, status_code=404, media_type="text/html; charset=utf-8")
