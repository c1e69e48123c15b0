"""`bigstep report --watch`: a page about runs in progress, for a browser on this machine, updated as records grow.

The server listens on 127.0.0.1 only and knows two addresses: the page, and a token that changes with the records. It
serves no files, so no address leads to one. The page polls the token and reloads itself when the token has changed.
"""

from __future__ import annotations

import hashlib
import html
import json
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bigstep.errors import ConfigError, DataError
from bigstep.records import in_use
from bigstep.report.gather import gather, run_folders
from bigstep.report.html import render
from bigstep.report.study import study_of

__all__ = ["Watch", "watch_command"]

ASK_EVERY_S = 3
"""Seconds between two polls by the page; it is rendered again only if the records have changed."""
_SCRIPT = """<script>
const shown = "%s";
setInterval(async () => {
  try {
    const now = await (await fetch("state", {cache: "no-store"})).json();
    if (now.state !== shown) location.reload();
  } catch { document.title = "(ended) " + document.title.replace("(ended) ", ""); }
}, %d);
</script>
</body>"""
_EMPTY = (
    "<!doctype html><meta charset=utf-8><title>bigstep</title><body><p>%s This page will reload by itself.</p></body>"
)


class Watch(ThreadingHTTPServer):
    """Serves the page about some runs on this machine; has `serve_forever`, like any server of the standard library.

    >>> with Watch([Path("runs")]) as watch:
    ...     watch.address.startswith("http://127.0.0.1:")
    True
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int = 0) -> None:
        self._paths, self._drawn, self._drawing = list(paths), ("", b""), threading.Lock()
        try:
            super().__init__(("127.0.0.1", port), _Page)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "a port lies between 0 and 65535"
            raise ConfigError(f"--port {port} cannot be used ({why}); leave it out to take any free port.") from None

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a browser that disconnects before it has the whole page; report anything else as usual."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # the stubs want a socket

    def state(self) -> str:
        """Return a token that changes when a record does."""
        seen = []
        for path in self._paths:
            for folder in run_folders(path):
                seen.append(f"{in_use(folder)}")  # a run that is killed changes no file, but no longer holds its lock
                for name in ("run.json", "metrics.jsonl"):
                    try:
                        found = (folder / name).stat()
                    except OSError:  # not written yet, or removed
                        continue
                    seen.append(f"{folder / name} {found.st_size} {found.st_mtime_ns}")
        return hashlib.sha256("\n".join(seen).encode()).hexdigest()[:16]

    def page(self) -> bytes:
        """Return the page, rendered again if the records have changed."""
        with self._drawing:
            state = self.state()
            if state != self._drawn[0]:
                script = _SCRIPT % (state, 1_000 * ASK_EVERY_S)
                self._drawn = state, script.join(self._text().rsplit("</body>", 1)).encode()
            return self._drawn[1]

    def _text(self) -> str:
        try:
            return render(study_of(gather(self._paths)))
        except DataError as error:  # nothing recorded yet, or a file that is just being written
            return _EMPTY % html.escape(str(error))


class _Page(BaseHTTPRequestHandler):
    """Answers two addresses, and only if the Host header names this machine."""

    server: Watch
    server_version, sys_version = "bigstep", ""

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        """Answer with the page or with the state of the records."""
        port = self.server.server_port
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self.send_error(403, "Ask for 127.0.0.1")  # refuse DNS rebinding
        elif self.path == "/":
            self._send("text/html; charset=utf-8", self.server.page())
        elif self.path == "/state":
            self._send("application/json", json.dumps({"state": self.server.state()}).encode())
        else:
            self.send_error(404)

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        """Log no requests: the terminal is the user's."""


def watch_command(paths: Sequence[Path], port: int) -> None:
    """Serve the page until Ctrl-C."""
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist; give the folder that `bigstep train` writes, or the one above it.")
    with Watch(paths, port) as server:
        print(f"{server.address} shows these runs as they progress; Ctrl-C stops it.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("Stopped; the runs continue.")
