import json
from pathlib import Path
from typing import Any

from outpace.monitoring.efficiency import Timeline


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == kind]


def test_spans_become_events_in_microseconds_since_the_start(tmp_path: Path) -> None:
    clock = Clock()
    timeline = Timeline(clock=clock)
    clock.now = 51.0
    with timeline.measure("learner", "chunk", version=3):
        clock.now = 51.5
    timeline.write(tmp_path / "timeline.json")
    (event,) = events_of(tmp_path / "timeline.json", "X")
    assert (event["ts"], event["dur"], event["cat"], event["args"]) == (1e6, 5e5, "learner", {"version": 3})


def test_overlapping_spans_are_on_different_tracks_of_their_component(tmp_path: Path) -> None:
    timeline = Timeline(clock=Clock())
    for name, start, end in (("a", 0, 2), ("b", 1, 3), ("c", 2, 4), ("d", 3, 5)):
        timeline.span("engine", name, start, end)
    timeline.span("learner", "e", 0, 9)
    timeline.write(tmp_path / "t.json")
    tracks = {event["name"]: event["tid"] for event in events_of(tmp_path / "t.json", "X")}
    assert tracks["a"] == tracks["c"] != tracks["b"] == tracks["d"]
    assert tracks["e"] not in (tracks["a"], tracks["b"])
    names = [event["args"]["name"] for event in events_of(tmp_path / "t.json", "M") if event["name"] == "thread_name"]
    assert sorted(names) == ["engine", "engine", "learner"]


def test_only_the_newest_spans_are_kept_and_the_others_are_counted(tmp_path: Path) -> None:
    timeline = Timeline(cap=3, clock=Clock())
    for index in range(5):
        timeline.span("p", str(index), index, index + 1)
    timeline.write(tmp_path / "t.json")
    assert len(timeline) == 3
    assert [event["name"] for event in events_of(tmp_path / "t.json", "X")] == ["2", "3", "4"]
    assert json.loads((tmp_path / "t.json").read_text())["otherData"] == {"dropped": 2}


def test_a_span_is_kept_if_the_measured_code_raises() -> None:
    timeline = Timeline()
    try:
        with timeline.measure("learner", "chunk"):
            raise KeyError
    except KeyError:
        assert len(timeline) == 1


def test_an_empty_timeline_is_a_valid_trace(tmp_path: Path) -> None:
    Timeline().write(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []
