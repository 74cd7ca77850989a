"""A real browser without a window, for pages that go on working after they have loaded."""

import base64
import io
import json
import os
import subprocess
import time
from contextlib import contextmanager

from helpers import need_browser
from matplotlib.image import imread


class Page:
    """A page in a browser, spoken to in the DevTools protocol through a pair of pipes."""

    def __init__(self, answers, requests):
        self.answers, self.requests, self.unread = answers, requests, b""
        self.calls, self.session, self.errors = 0, {}, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.session = {"sessionId": session}
        self.call("Runtime.enable")
        self.call("Log.enable")

    def read(self):
        """Return the next message of the browser."""
        while b"\0" not in self.unread:
            part = os.read(self.answers, 1 << 20)
            assert part, "the browser is gone"
            self.unread += part
        message, self.unread = self.unread.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **params):
        """Call a method of the protocol and return its result. Note the errors of the page."""
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": params, **self.session}
        os.write(self.requests, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.calls:
            said = answer.get("params", {})
            if "exceptionDetails" in said:
                self.errors.append(said["exceptionDetails"]["text"])
            elif "error" in (said.get("entry", {}).get("level"), said.get("type")):
                self.errors.append(str(said.get("entry", said.get("args"))))
        assert "error" not in answer, answer
        return answer["result"]

    def value(self, expression):
        """Return the value of a JavaScript expression in the page."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return done["result"].get("value")

    def wait_for(self, expression, seconds=60):
        """Wait until a JavaScript expression is true in the page, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"never true: {expression}\n{self.errors}"
            time.sleep(0.2)
        return value

    def picture(self, left, top, width, height):
        """Return what a part of the page looks like: from 0 to 1, [height, width, 3]."""
        clip = {"x": left, "y": top, "width": width, "height": height, "scale": 1}
        png = base64.b64decode(self.call("Page.captureScreenshot", clip=clip)["data"])
        return imread(io.BytesIO(png))[..., :3]


@contextmanager
def browse(url, folder):
    """Open a page and yield it. folder is for the browser's own files.

    Afterwards, page.errors holds what its console complained of, and page.asked_for the addresses
    that the page and its workers asked for.
    """
    browser = need_browser()
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    log = folder / "network.json"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    command += ["--window-size=1600,1000", f"--user-data-dir={folder}", f"--log-net-log={log}"]
    # The browser reads from descriptor 3 and writes to 4.
    pipes = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash"]
    process = subprocess.Popen(
        [*pipes, *command],
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
