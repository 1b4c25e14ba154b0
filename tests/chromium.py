"""A headless chromium for the tests: the one on PATH, driven by playwright, with nothing of its own that would ask the network."""

import shutil
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
             "--disable-sync"]


@contextmanager
def launched():
    """A browser that is ended with the block, whatever happens in it."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, f"none of {', '.join(NAMES)} is on PATH; install chromium to run the browser tests"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()
