"""Logging: JSON lines for machines, plain ones for people."""

import logging
import sys
from typing import Any

import orjson
from typing_extensions import override

PLAIN = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line; whatever a message holds, it cannot begin a line of its own."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        told = getattr(record, "audit", None)
        if told:
            line |= {"message": told["action"], "audit": told}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def set_up(level: str, form: str) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(PLAIN))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf logs every handler of every event; what matters is logged by the passes.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf.objects").setLevel(logging.ERROR)
    for name in ("aiohttp.access", "mcp"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It warns of each line that a stranger sends and that is no HTTP.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
