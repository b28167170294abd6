"""Build the site of mkdocs.yml from the pages as they lie in the repository, links checked: `make docs`.

Pages are copied to where they lie, so that a link that works on a code host works on the site. A page that the
navigation does not name is added to it: decisions and notes under their own headings, others under "More".
"""

import logging
import shutil
import subprocess
import sys
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("*.md", "docs", "demo/kimi-nano/*.png", "benchmarks/results", "docker/grafana/dashboards", "LICENSE")
"""The pages and what they link to, as git patterns."""


def gather(pages: Path) -> list[str]:
    """Copy everything shown into an empty folder. Returns the pages' names."""
    shutil.rmtree(pages, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", *SHOWN], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split() if (ROOT / name).exists()]
    for name in names:
        (pages / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, pages / name)
    return [name for name in names if name.endswith(".md")]


def complete_navigation(config: MkDocsConfig, pages: list[str]) -> None:
    """Add the pages that mkdocs.yml does not name."""
    nav = list(config.nav or [])
    named = {page for section in nav for entries in section.values() for page in entries}
    left = [page for page in pages if page not in named]
    more = {"Decisions": "docs/decisions/", "Notes": "benchmarks/results/", "More": ""}
    for title, folder in more.items():
        entries = [page for page in left if page.startswith(folder)]
        left = [page for page in left if page not in entries]
        if entries:
            nav.append({title: entries})
    config.nav = nav


def main() -> None:
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    pages = gather(ROOT / "out/pages")
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True)
    complete_navigation(config, pages)
    try:
        build(config)
    except Abort as error:
        sys.exit(str(error))
    sys.stdout.write(f"{len(pages)} pages: {Path(config.site_dir).relative_to(ROOT)}/index.html\n")


if __name__ == "__main__":
    main()
