"""Pages hold together: every link leads somewhere, every page can be reached, every page is about the project alone."""

from __future__ import annotations

import pytest
from pages import PAGES, ROOT, anchors, links, prose

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name):
    page, broken = ROOT / name, []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_every_page_of_the_documentation_is_in_its_index():
    index = ROOT / "docs/README.md"
    listed = {(index.parent / target.partition("#")[0]).resolve() for target in links(index)}
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - {index}
    assert len(pages) > 15
    assert {str(page.relative_to(ROOT)) for page in pages - listed} == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_one_title_and_no_leftovers(name):
    text = prose(ROOT / name)
    assert [line[:2] for line in text.splitlines() if line.startswith("# ")] == ["# "]
    assert [word for word in ("TODO", "FIXME", "TBD", "XXX") if word in text] == []
