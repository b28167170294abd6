"""Pages stay readable: lines and pages of a length, decisions of one page."""

import re
from pathlib import Path

import pytest

from support.documented_commands import pages

ROOT = Path(__file__).resolve().parents[2]
PAGES = pages()
MOST_CHARACTERS, MOST_LINES, MOST_LINES_OF_A_DECISION = 120, 250, 80
FENCE = re.compile(r"^```.*?^```\n", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_lines_fit_a_screen(page):
    """Tables may be wider, and commands that a shell would not take in two lines."""
    text = FENCE.sub("", (ROOT / page).read_text())
    prose = re.sub(r"\]\([^)\s]+\)", "]()", text).splitlines()
    assert [line for line in prose if len(line) > MOST_CHARACTERS and not re.match(r" *\||    ", line)] == []


@pytest.mark.parametrize("page", sorted(PAGES))
def test_pages_can_be_read(page):
    most = MOST_LINES_OF_A_DECISION if page.startswith("docs/decisions/") else MOST_LINES
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_each_page_is_reached_from_the_readme():
    reached, new = set(), {"README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s]+\.md)", FENCE.sub("", (ROOT / page).read_text()))
        targets = {((ROOT / page).parent / link).resolve() for link in links if "://" not in link}
        new |= {str(target.relative_to(ROOT)) for target in targets if target.exists()} - reached
    assert set(PAGES) - reached == set(), "link them from docs/README.md"


def test_each_file_of_the_support_code_has_its_line():
    folder = ROOT / "tests" / "support"
    listed = re.findall(r"`(\w+\.(?:py|json))`", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in folder.iterdir() if path.suffix in (".py", ".json"))
