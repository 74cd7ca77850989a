"""A real browser without a window, for pages that go on working after they have loaded."""

import json
import os
import subprocess
import time
from contextlib import contextmanager

from helpers import need_browser


class Page:
    """A page in a browser, spoken to in the DevTools protocol through a pair of pipes."""

    def __init__(self, answers, requests):
        self.answers, self.requests = answers, requests
        self.unread = b""
        self.calls = 0
        self.session = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}

    def read(self):
        """Return the next message of the browser."""
        while b"\0" not in self.unread:
            part = os.read(self.answers, 1 << 20)
            assert part, "the browser is gone"
            self.unread += part
        message, self.unread = self.unread.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        """Call a method of the protocol and return its result."""
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": params, **self.session}
        os.write(self.requests, json.dumps(message).encode() + b"\0")
        answer = self.read()
        while answer.get("id") != self.calls:
            answer = self.read()
        assert "error" not in answer, answer
        return answer["result"]

    def wait_for(self, expression, seconds=120):
        """Wait until a JavaScript expression is true in the page, and return its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
            if done["result"].get("value"):
                return done["result"]["value"]
            time.sleep(0.2)
        raise AssertionError(f"never true: {expression}")


@contextmanager
def browse(url, folder):
    """Open a page and yield it. folder is for the browser's own files.

    Afterwards, page.asked_for holds the addresses that the page and its workers asked for.
    """
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    folder.mkdir()
    log = folder / "network.json"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    options += ["--window-size=1600,1000", f"--user-data-dir={folder}", f"--log-net-log={log}"]
    # The browser reads from descriptor 3 and writes to 4.
    pipes = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash"]
    process = subprocess.Popen(
        [*pipes, need_browser(), *options],
        pass_fds=(theirs_in, theirs_out),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        page = Page(ours_in, ours_out)
        page.call("Page.navigate", url=url)
        yield page
        page.session = {}
        page.call("Browser.close")
        process.wait(20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
        os.close(ours_in)
        os.close(ours_out)
    params = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    page.asked_for = {x["url"] for x in params if url.startswith(x.get("initiator", "?"))}
