"""A few reads from the API server, quicker than a kubectl for each."""

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


class Api:
    """Reads as one user, over a fresh connection each time."""

    def __init__(self, url: str, ca_file: Path, certificate: Path, key: Path) -> None:
        self._url = url
        self._context = ssl.create_default_context(cafile=str(ca_file))
        self._context.load_cert_chain(certificate, key)

    def text(self, path: str) -> str | None:
        """Return what is at `path`, or None when the server is away or answers an error."""
        request = urllib.request.Request(self._url + path)  # noqa: S310 - always https
        try:
            with urllib.request.urlopen(request, timeout=5, context=self._context) as answer:  # noqa: S310
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError, ssl.SSLError):
            return None

    def json(self, path: str) -> Any:
        """Return the object at `path`, or None when there is none to be had."""
        text = self.text(path)
        return None if text is None else json.loads(text)

    def ready(self) -> bool:
        """Whether the API server says that it is ready for everything."""
        return self.text("/readyz") is not None

    def ready_nodes(self) -> set[str]:
        """Return the names of the nodes that are Ready."""
        nodes = self.json("/api/v1/nodes?resourceVersion=0") or {"items": []}
        return {
            node["metadata"]["name"]
            for node in nodes["items"]
            for condition in node.get("status", {}).get("conditions", ())
            if condition["type"] == "Ready" and condition["status"] == "True"
        }
