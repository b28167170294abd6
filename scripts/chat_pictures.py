"""Takes the pictures of the chat page that README and docs show, of kimi-nano behind a real server.

    PYTHONPATH=tests python scripts/chat_pictures.py [--out docs/images] [--port 9000]

Needs Chromium. kimi-nano is served with both proposers, so that all three origins of text are to be seen: one reply
at 1,280 pixels while it is written, in the light scheme, and a whole one at 390 pixels, in the dark one.
"""

import argparse
import tempfile
from pathlib import Path

from kimi_backend.hosting.embedded_server import free_port
from served_load import serving
from support.browser import Page, open_page

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
SETTINGS = {"temperature": 0, "k": 3, "max": 120, "seed": 1}
SHOWN_WHILE_WRITING = "document.querySelectorAll('.reply .lookup').length >= 3 && log.textContent.length > 300"


def ask(page: Page, root: str, width: int, height: int, scheme: str) -> None:
    """Open the page anew, set what a reader would set, and send the prompt."""
    page.open(root, width=width, height=height, scheme=scheme)
    page.wait_for("$('where').textContent")
    for name, value in SETTINGS.items():
        page.evaluate(f"$('{name}').value = {value}")
    page.evaluate("$('code').checked = true; showSettings(); prompt.focus()")
    page.type(PROMPT)
    page.press("Enter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    parser.add_argument("--port", type=int, default=9000, help="of the endpoint; it is to be seen on the page")
    args = parser.parse_args()
    ports = {**{name: free_port() for name in ("http", "grpc", "metrics")}, "openai": args.port}
    variables = {"KIMI_PROPOSER": "lookup+eagle3"}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(ROOT / "demo/kimi-nano", Path(folder), ports=ports, variables=variables),
        open_page() as page,
    ):
        root = f"http://127.0.0.1:{args.port}/"
        ask(page, root, 1280, 800, "light")
        page.wait_for(SHOWN_WHILE_WRITING)
        (args.out / "chat_1280.png").write_bytes(page.screenshot())
        page.wait_for("document.querySelector('.foot')")
        ask(page, root, 390, 844, "dark")
        page.wait_for("document.querySelector('.foot')")
        (args.out / "chat_390.png").write_bytes(page.screenshot())
        elsewhere = [url for url in page.requests if not url.startswith((root, "data:"))]
        if elsewhere or page.problems:
            raise SystemExit(f"the page asked for {elsewhere} and wrote to its console: {page.problems}")


if __name__ == "__main__":
    main()
