"""Reads one HTML page: its title, the words a reader sees, its links."""

from html.parser import HTMLParser

# typing.override is not in the standard library of Python 3.11, and there is nothing else here.
HIDDEN = frozenset({"script", "style", "template"})


class Page(HTMLParser):
    """Takes the text and the links out of one HTML page."""

    def __init__(self, body: str) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self.words = 0
        self.links: list[str] = []
        self._open = ""
        self.feed(body)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # type: ignore[explicit-override]
        """Remember links, and what kind of text comes next."""
        if tag in HIDDEN or tag == "title":
            self._open = tag
        elif tag == "a" and (target := dict(attrs).get("href")):
            self.links.append(target)

    def handle_endtag(self, tag: str) -> None:  # type: ignore[explicit-override]
        """Text is ordinary text again."""
        if tag == self._open:
            self._open = ""

    def handle_data(self, data: str) -> None:  # type: ignore[explicit-override]
        """Count the words that a reader sees."""
        if self._open == "title":
            self.title = f"{self.title} {data}".strip()
        elif not self._open:
            self.words += len(data.split())
