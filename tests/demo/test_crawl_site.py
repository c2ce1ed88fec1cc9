"""The demo's crawler, against a real web server of a few pages."""

from collections.abc import Iterator

import pytest

from demo.tools.contract import ArgumentError, ToolError
from demo.tools.crawl_site import crawl_site, new_crawl
from demo.tools.page import Page
from tests.demo.site import serving


def page(title: str, text: str, *links: str) -> str:
    anchors = "".join(f'<a href="{link}">x</a>' for link in links)
    return f"<html><head><title>{title}</title></head><body>{text} {anchors}</body></html>"


PAGES = {
    "/docs/index.html": page("Home", "one two three", "a.html", "sub/b.html#part", "missing.html"),
    "/docs/a.html": page("A", "four", "index.html", "a.html", "notes.txt", "/other/c.html"),
    "/docs/sub/b.html": page("B", "five six", "../a.html", "mailto:x@example.org", "http://[bad"),
    "/docs/notes.txt": "plain text with <a href='d.html'>no link</a>",
    "/docs/d.html": page("D", "never linked"),
    "/other/c.html": page("C", "outside the prefix", "/docs/d.html"),
}


@pytest.fixture
def site() -> Iterator[str]:
    with serving(PAGES) as url:
        yield url


def test_every_page_under_the_prefix_is_read_once_though_the_links_form_a_loop(site: str) -> None:
    crawl = new_crawl({"start": f"{site}/docs/index.html"})
    crawl.run()
    assert sorted(crawl.pages) == [
        f"{site}/docs/{name}" for name in ("a.html", "index.html", "sub/b.html")
    ]


def test_pages_are_read_breadth_first(site: str) -> None:
    crawl = new_crawl({"start": f"{site}/docs/index.html"})
    crawl.run()
    assert [title for title, _ in crawl.pages.values()] == ["Home", "A", "B"]


def test_broken_links_are_named_with_the_page_that_has_them(site: str) -> None:
    result = crawl_site({"start": f"{site}/docs/index.html"})
    problems = {example["url"]: example["problem"] for example in result["broken_examples"]}
    assert result["broken"] == len(problems) == 2
    assert "404" in problems[f"{site}/docs/missing.html"]
    assert f"linked from {site}/docs/index.html" in problems[f"{site}/docs/missing.html"]
    assert problems["http://[bad"] == f"not a URL (linked from {site}/docs/sub/b.html)"


def test_files_that_are_not_html_are_counted_and_not_searched_for_links(site: str) -> None:
    result = crawl_site({"start": f"{site}/docs/index.html"})
    assert (result["other_files"], result["pages"]) == (1, 3)


def test_links_that_lead_out_of_the_prefix_are_counted_and_not_followed(site: str) -> None:
    result = crawl_site({"start": f"{site}/docs/index.html"})
    assert (result["external"], result["pages"]) == (1, 3)
    assert crawl_site({"start": f"{site}/docs/index.html", "prefix": "/"})["pages"] == 5


def test_no_more_pages_are_read_than_were_asked_for(site: str) -> None:
    assert crawl_site({"start": f"{site}/docs/index.html", "max_pages": 2})["pages"] == 2


def test_the_result_sums_up_pages_words_and_links(site: str) -> None:
    result = crawl_site({"start": f"{site}/docs/index.html"})
    # Three pages of 3, 1 and 2 words; each link has the word x.
    assert result["words"] == 6 + 10
    assert result["links"] == 10
    assert result["summary"] == "3 pages, 16 words, 10 links, 2 broken"
    assert result["longest_pages"][0] == {"title": "Home", "words": 6}


def test_a_site_that_cannot_be_read_at_all_is_an_error() -> None:
    with serving({}) as url, pytest.raises(ToolError, match=r"no page could be read.*404"):
        crawl_site({"start": f"{url}/index.html"})


def test_words_in_scripts_and_styles_are_not_counted() -> None:
    read = Page("<title>T</title><style>a b</style><script>c d</script><p>e &amp; f</p>")
    assert (read.title, read.words) == ("T", 3)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param({}, "start must be an http or https URL, not ''", id="no start"),
        pytest.param({"start": "file:///etc/passwd"}, "start must be", id="not http"),
        pytest.param({"start": "http://x/a/b", "prefix": "/c/"}, "prefix /c/", id="other prefix"),
        pytest.param({"start": "http://x/", "max_pages": 0}, "max_pages", id="no pages"),
        pytest.param({"start": "http://x/", "max_pages": "9"}, "max_pages", id="not a number"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        new_crawl(arguments)
