"""A small web site for crawlers to fall over: links, a loop, a broken link, other files."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from typing_extensions import override

TIMEOUT = 5.0


@contextmanager
def serving(pages: Mapping[str, str]) -> Iterator[str]:
    """Serve the pages, by path, on a free port of the loopback address; yield the site's URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages.get(self.path)
            kind = (
                "text/html; charset=utf-8" if self.path.endswith((".html", "/")) else "text/plain"
            )
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write((body or "").encode())

        @override
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(TIMEOUT)
