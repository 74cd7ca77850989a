"""What lessons leave to be looked at: traces of all ranks, and curves for TensorBoard."""

import json
import sys
from urllib.request import urlopen

import pytest
from support.forked_ranks import run_ranks
from support.run import LESSONS, ROOT, output_of, server

pytest.importorskip("viztracer")
VIEWER = [sys.executable, str(ROOT / "scripts" / "view_traces.py")]


def write_trace(folder, rank, events, begin=0):
    trace = {"baseTimeNanoseconds": begin, "traceEvents": events}
    (folder / f"rank{rank}.1.pt.trace.json").write_text(json.dumps(trace))


def event(name, pid, tid, ts, ph="X", **more):
    return {"ph": ph, "name": name, "pid": pid, "tid": tid, "ts": ts, **more}


def merged(folder):
    """Return the events that the viewer shows of a folder, without metadata."""
    with server(*VIEWER, folder, "--no-browser", cwd=folder) as url:
        answer = json.load(urlopen(f"{url}traces.json", timeout=20))
    return [e for e in answer["traceEvents"] if e["ph"] != "M"]


def test_every_rank_of_a_lesson_has_its_place_on_the_time_line(tmp_path):
    output_of(run_ranks(2, ROOT / LESSONS["5"]["file"], "--max-steps", 6, cwd=tmp_path))
    events = merged(tmp_path / "log_ddp")
    for rank in (0, 1):
        names = {e["name"] for e in events if e["pid"] == rank}
        assert {"aten::conv2d", "gloo:all_reduce"} <= names
    assert {e["pid"] for e in events} == {0, 1}


def test_ranks_with_the_same_numbers_are_kept_apart(tmp_path):
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
        write_trace(tmp_path, rank, events, begin)
    events = merged(tmp_path)
    for rank in (0, 1):
        bars = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        assert {e["name"]: e["ts"] for e in bars} == {"step": 0, "forward": 10, "kernel": 20}
        assert len({e["tid"] for e in bars}) == 3
    starts, ends = ([e["id"] for e in events if e["ph"] == ph] for ph in "sf")
    assert starts == ends
    assert len(set(starts)) == 2
