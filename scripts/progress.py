"""A sign of life while something takes long and prints nothing. Needs the standard library only."""

import threading
import time

QUIET = 10  # seconds without a line, after which one says that it goes on


class SignOfLife:
    """In a with statement: print a line whenever said() was not called for QUIET seconds."""

    def __init__(self, indent=""):
        self._indent = indent
        self._begin = self._last = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._done.set()
        self._thread.join()

    def said(self):
        self._last = time.monotonic()

    def _watch(self):
        while not self._done.wait(0.5):
            now = time.monotonic()
            if now - self._last > QUIET:
                print(f"{self._indent}... {now - self._begin:.0f} s, and it goes on", flush=True)
                self.said()
