"""Crawls a web site breadth first: titles, words, links, and which links are broken.

Arguments: `start` (URL), `prefix` (path that pages must lie under, default the start's folder),
`max_pages` (default 1000), `delay_ms` (pause between requests, default 0).
"""

import http.client
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urldefrag, urljoin, urlsplit

from .contract import ArgumentError, ToolError, progress, run
from .page import Page

TIMEOUT_SECONDS = 10.0
MAX_BODY_BYTES = 8 << 20
MAX_PAGES = 10_000
EXAMPLES = 5
URL_SHOWN = 150
PROGRESS_SECONDS = 1.0


@dataclass
class Crawl:
    """One crawl: what is known, what comes next, what was found."""

    start: str
    prefix: str
    max_pages: int
    delay: float = 0.0
    pages: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Title and words by URL."""
    broken: dict[str, str] = field(default_factory=dict)
    """Where it was linked and what went wrong, by URL."""
    links: int = 0
    external: set[str] = field(default_factory=set)
    other_files: int = 0

    def run(self) -> None:
        """Visit page after page until none is left or there are enough."""
        waiting, seen, said = deque([(self.start, "")]), {self.start}, time.monotonic()
        while waiting and len(self.pages) < self.max_pages:
            url, source = waiting.popleft()
            for link in self._visit(url, source):
                if link not in seen:
                    seen.add(link)
                    waiting.append((link, url))
            if time.monotonic() - said >= PROGRESS_SECONDS:
                said = time.monotonic()
                known = min(self.max_pages, len(self.pages) + len(waiting))
                text = f"{len(self.pages)} of {known} known pages, {self.words} words"
                progress(100 * len(self.pages) // max(known, 1), text)
            time.sleep(self.delay)

    @property
    def words(self) -> int:
        """Words on all pages so far."""
        return sum(words for _, words in self.pages.values())

    def _visit(self, url: str, source: str) -> list[str]:
        """Read one page; return the links to follow from it."""
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310 - the scheme was checked
                if answer.headers.get_content_type() != "text/html":
                    self.other_files += 1
                    return []
                charset = answer.headers.get_content_charset("utf-8")
                body = answer.read(MAX_BODY_BYTES).decode(charset, "replace")
        except (OSError, LookupError, ValueError, http.client.HTTPException) as error:
            self.broken[url] = f"{error} (linked from {source or 'the arguments'})"
            return []
        page = Page(body)
        self.pages[url] = (page.title, page.words)
        self.links += len(page.links)
        return [link for target in page.links if (link := self._resolve(answer.url, target))]

    def _resolve(self, base: str, target: str) -> str | None:
        """Return the absolute URL of a link if it is to be followed."""
        try:
            url = urldefrag(urljoin(base, target.strip())).url
            parts, start = urlsplit(url), urlsplit(self.start)
        except ValueError:
            self.broken[target] = f"not a URL (linked from {base})"
            return None
        if parts.scheme not in {"http", "https"}:
            return None
        if parts.netloc != start.netloc or not parts.path.startswith(self.prefix):
            self.external.add(url)
            return None
        return url


def crawl_site(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Crawl as the arguments say; return the result."""
    crawl, began = new_crawl(arguments), time.monotonic()
    crawl.run()
    if not crawl.pages:
        raise ToolError(f"no page could be read: {next(iter(crawl.broken.values()), crawl.start)}")
    longest = sorted(crawl.pages.items(), key=lambda item: -item[1][1])[:EXAMPLES]
    return {
        "summary": f"{len(crawl.pages)} pages, {crawl.words} words, {crawl.links} links, "
        f"{len(crawl.broken)} broken",
        "pages": len(crawl.pages),
        "words": crawl.words,
        "links": crawl.links,
        "external": len(crawl.external),
        "other_files": crawl.other_files,
        "broken": len(crawl.broken),
        "broken_examples": [
            {"url": url[:URL_SHOWN], "problem": problem[:URL_SHOWN]}
            for url, problem in list(crawl.broken.items())[:EXAMPLES]
        ],
        "longest_pages": [
            {"title": title[:URL_SHOWN], "words": words} for _, (title, words) in longest
        ],
        "seconds": round(time.monotonic() - began, 1),
    }


def new_crawl(arguments: Mapping[str, Any]) -> Crawl:
    """Check the arguments and fill in what they leave open."""
    start = str(arguments.get("start", ""))
    parts = urlsplit(start)
    if parts.scheme not in {"http", "https"} or not parts.netloc:
        raise ArgumentError(f"start must be an http or https URL, not {start!r}")
    prefix = str(arguments.get("prefix") or (parts.path or "/").rpartition("/")[0] + "/")
    if not (parts.path or "/").startswith(prefix):
        raise ArgumentError(f"start ({start}) does not lie under the prefix {prefix}")
    max_pages = arguments.get("max_pages", 1000)
    if not isinstance(max_pages, int) or not 1 <= max_pages <= MAX_PAGES:
        raise ArgumentError(f"max_pages must be a whole number from 1 to {MAX_PAGES}")
    delay = float(arguments.get("delay_ms", 0)) / 1000
    return Crawl(start=start, prefix=prefix, max_pages=max_pages, delay=delay)


if __name__ == "__main__":
    run(crawl_site, terminate=True)
