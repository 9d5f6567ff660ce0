"""The report as a live page: served from this machine and updated during a run or a sweep."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from kairosfl.errors import UserError, first_line
from kairosfl.report.checked import Say, silent
from kairosfl.report.page import page, shell
from kairosfl.report.read import read_run, read_study

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"(?P<name>[a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")  # of a Host header
REST = 5  # times as long as the last refresh took: the training needs the machine more
_FILES = ("metrics.jsonl", "summary.json", "sweep.json")
# What the scripts read where there are no results.
_NOTHING: dict[str, Any] = {
    "groups": [],
    "lines": [],
    "heats": [],
    "runs": [],
    "words": {},
    "target": None,
    "metric": {"scale": 1, "sign": 1},
    "varied": {},
    "versus": {},
}


class LivePage:
    """The page about a folder, rebuilt when a file in it has changed, at a limited rate."""

    def __init__(
        self,
        folder: Path,
        target: float | None = None,
        say: Say = silent,
        baseline: str | None = None,
    ) -> None:
        self.folder = folder
        self.target = target
        self.say = say
        self.baseline = baseline
        self._reported: set[str] = set()  # what is damaged, each said once
        self._lock = threading.Lock()
        self._mark = ""
        self._text = ""
        self._due = 0.0

    def newer(self, since: str) -> str | None:
        """The document, unless the reader's mark says that they have it already."""
        with self._lock:
            if time.monotonic() >= self._due:
                began = time.monotonic()
                mark = self._state()
                if mark != self._mark:
                    self._text = self._make(mark)
                    self._mark = mark
                self._due = time.monotonic() + REST * (time.monotonic() - began)
            return None if since == self._mark else self._text

    def _state(self) -> str:
        """A short digest of the state of the folder."""
        state = hashlib.sha256()
        for name in _FILES:
            for path in sorted(self.folder.rglob(name)):
                with contextlib.suppress(FileNotFoundError):  # a run may be removed at any time
                    stat = path.stat()
                    state.update(f"{path} {stat.st_mtime_ns} {stat.st_size}\n".encode())
        return state.hexdigest()[:16]

    def _make(self, mark: str) -> str:
        try:
            study = read_study([self.folder])
            for sentence in study.all_damaged():
                if sentence not in self._reported:
                    self._reported.add(sentence)
                    self.say(sentence)
            return page(study, target=self.target, baseline=self.baseline, mark=mark)
        except UserError as error:
            has_begun = any(self.folder.rglob("metrics.jsonl"))
            words = str(error) if has_begun else "Waiting for the first round."
            return self._empty(words, mark)

    def _empty(self, words: str, mark: str) -> str:
        """A page without results, which says why."""
        body = (
            '<div id="page"><header>'
            '<p class="over"><span id="live">Kairos report, live</span></p>'
            f'<h1>{escape(self.folder.name)}</h1><p class="verdict">{escape(words)}</p>'
            "</header></div>"
        )
        return shell(self.folder.name, body, json.dumps(_NOTHING), mark)


class _Server(ThreadingHTTPServer):
    """A server that does not print what happens to one request."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a peer that goes away; report any other fault in one line."""
        error = sys.exception()
        if not isinstance(error, OSError | None):
            sys.stderr.write(
                f"kairosfl: a request failed: {type(error).__name__}: {first_line(error)}\n"
            )


def serve(
    folder: Path,
    port: int = 8765,
    host: str = "127.0.0.1",
    target: float | None = None,
    say: Say = silent,
    baseline: str | None = None,
) -> ThreadingHTTPServer:
    """A server that is bound but not yet running; port 0 takes a free one."""
    if not folder.is_dir():
        wrong = f"{folder} is not a directory" if folder.exists() else f"{folder} does not exist"
        raise UserError(f"{wrong}; give the folder that a run or a sweep writes to.")
    # Before a run has begun it is not known what the target is of: the page will say so.
    metrics = next(folder.rglob("metrics.jsonl"), None)
    if target is not None and metrics is not None:
        read_run(metrics.parent).score.check(target)
    live = LivePage(folder, target, say, baseline)
    try:
        return _Server((host, port), _handler(live, host))
    except OverflowError:
        raise UserError(
            f"port = {port} is not a port; use 1 to 65535, or 0 for a free one."
        ) from None
    except OSError as error:
        raise UserError(
            f"Cannot serve on {host}:{port} ({error.strerror or error}); choose another --port."
        ) from None


def watch(
    folder: Path,
    port: int = 8765,
    host: str = "127.0.0.1",
    *,
    target: float | None = None,
    baseline: str | None = None,
    ready: Callable[[str], None] | None = None,
    say: Say = silent,
) -> None:
    """Serve the folder's report until interrupted; the address is printed, or given to `ready`.

    `say` is called once for each damaged file.
    """
    with serve(Path(folder), port, host, target, say, baseline) as server:
        address = f"http://{host}:{server.server_port}/"
        if ready is None:
            print(f"watching at {address} (Ctrl-C ends it)", flush=True)
        else:
            ready(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)


def _handler(live: LivePage, host: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30
        raw_requestline: bytes  # set by the base class

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if host in _LOOPBACK and not self._asks_here():
                # A foreign name that resolves to this machine is another site trying to read the
                # page.
                self._answer(HTTPStatus.FORBIDDEN, b"")
            elif path != "/":
                self._answer(HTTPStatus.NOT_FOUND, b"")
            else:
                text = live.newer("".join(parse_qs(query).get("since", [])))
                if text is None:
                    self._answer(HTTPStatus.NO_CONTENT, b"")
                else:
                    self._answer(HTTPStatus.OK, text.encode())

        def _asks_here(self) -> bool:
            """Whether the request names this machine once, as browsers do, perhaps with a port."""
            names = self.headers.get_all("Host", [])
            if len(names) != 1:
                return False
            match = _HOST.fullmatch(names[0].strip().lower())
            return match is not None and match["name"].strip("[]") in _LOOPBACK

        def parse_request(self) -> bool:
            """Requests without a version have no headers: nothing is read, nothing answered."""
            if len(self.raw_requestline.split()) < 3:
                self.close_connection = True
                return False
            return super().parse_request()

        def _answer(self, status: HTTPStatus, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if status is not HTTPStatus.NO_CONTENT:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing to the terminal."""

    return Handler
