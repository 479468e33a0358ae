import io

import pytest
from rich.console import Console

from outpace.monitoring.console import ProgressConsole, RunView, final_report, live_panel, plain_line
from outpace.monitoring.format import clock_text, number, percent, si, sparkline
from outpace.monitoring.summary import EvalResult, Summary, SummaryBuilder
from outpace.types import EpisodeView, Failure
from support import names

METRICS = {
    "reward/mean": 0.5,
    "lag/mean": 0.75,
    "lag/max": 2.0,
    "throughput/sampled_tok_s": 12_345.0,
    "throughput/trained_tok_s": 9_000.0,
    "time/step_s": 2.0,
    "idle/learner_s": 0.2,
    "idle/engine_s": 0.1,
    "queue/running": 40.0,
    "queue/finished": 7.0,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(total: int | None, quiet: bool = False) -> tuple[ProgressConsole, io.StringIO, Clock]:
    file, clock = io.StringIO(), Clock()
    return ProgressConsole(total, quiet=quiet, file=file, clock=clock), file, clock


def build_summary() -> Summary:
    builder = SummaryBuilder()
    builder.evaluation(EvalResult(0, 0.21, 0.018, 512, binary=True))
    builder.evaluation(EvalResult(100, 0.84, 0.016, 512, binary=True))
    builder.step(100, METRICS | {"efficiency": 0.93, "throughput/trained_tokens": 5.0})
    return builder.build(wall_s=83, train_s=70, seed=0, exit=0, reason="all steps are done")


def render(thing: object) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(thing)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_progress_lines_are_throttled_but_include_the_first_and_last_step() -> None:
    console, file, clock = make(40)
    console.start()
    for step in range(1, 41):
        clock.now += 0.5
        console.step(step, METRICS)
    shown = [int(line.split()[1].split("/")[0]) for line in file.getvalue().splitlines()]
    assert shown == [1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 40]
    console.close()


def test_a_progress_line_shows_reward_accuracy_lag_waits_and_throughput() -> None:
    console, file, clock = make(100)
    console.evaluation(EvalResult(0, 0.25, 0.019, 512, binary=True))
    clock.now = 10.0
    console.step(1, METRICS)
    line = file.getvalue().splitlines()[-1]
    for fact in (
        "step 1/100",
        "reward 0.5",
        "25.0 % ± 1.9 %",
        "lag 0.75",
        "learner 10.0 %",
        "engine 5.0 %",
    ):
        assert fact in line
    assert names(line, "512 2 12.3k 9k 3:18")


def test_the_time_left_uses_the_pace_since_this_start_without_start_up_time() -> None:
    clock = Clock()
    view = RunView(100, clock)
    assert view.remaining_s is None
    clock.now = 20.0
    view.update(51, {})
    assert view.remaining_s == pytest.approx(20.0 * 49)
    clock.now = 24.0
    view.update(53, {})
    clock.now = 30.0
    assert view.remaining_s == pytest.approx(2.0 * 47)


def test_the_time_left_and_the_step_time_exclude_the_start_up_of_servers() -> None:
    clock = Clock()
    view = RunView(10, clock)
    clock.now = 121.0 + 2.0
    view.update(1, {"time/step_s": 2.0, "time/wall_s": 90.0})
    assert view.remaining_s == pytest.approx(2.0 * 9)
    summary = SummaryBuilder()
    summary.step(4, {})
    report = render(final_report(summary.build(wall_s=130, train_s=4, seed=0, exit=0), view))
    assert any(names(line, "4 0:04 2:01") for line in report.splitlines())


def test_missing_metrics_are_shown_as_a_dash() -> None:
    view = RunView(None, Clock())
    view.update(1, {})
    assert "reward –" in plain_line(view)
    assert "–" in render(live_panel(view, "outpace"))


def test_the_panel_shows_reward_history_waits_and_groups() -> None:
    view = RunView(100, Clock())
    view.evals = [EvalResult(version, reward, 0.01, 64, binary=True) for version, reward in ((0, 0.2), (10, 0.4))]
    for step in range(1, 11):
        view.update(step, METRICS | {"reward/mean": step / 10})
    panel = render(live_panel(view, "outpace"))
    for fact in (
        "step 10/100",
        "▁",
        "█",
        "20.0 %",
        "40.0 % ± 1.0 %",
        "40 running",
        "7 finished",
        "version 10",
    ):
        assert fact in panel
    assert names(panel, "64")


def test_the_shown_reward_is_the_mean_of_the_first_steps_and_then_a_moving_average() -> None:
    view = RunView(None, Clock())
    for step in range(1, 11):
        view.update(step, {"reward/mean": float(step)})
        assert view.reward == pytest.approx((step + 1) / 2)
    view.update(11, {})
    assert view.reward == pytest.approx(5.5)
    view.update(12, {"reward/mean": 15.5})
    assert view.reward == pytest.approx(0.9 * 5.5 + 0.1 * 15.5)


def test_a_reward_that_is_not_binary_is_not_called_accuracy() -> None:
    console, file, _ = make(1)
    console.evaluation(EvalResult(0, 0.25, 0.125, 4))
    line = file.getvalue()
    assert line.count("\n") == 1
    assert "0.25 ± 0.125" in line
    assert names(line, "reward 0 4")
    assert "accuracy" not in line


def test_quiet_prints_one_line_at_the_end() -> None:
    console, file, _ = make(1, quiet=True)
    console.start()
    console.status("starting")
    console.evaluation(EvalResult(0, 0.2, binary=True))
    console.step(1, METRICS)
    console.finish(build_summary(), "runs/a")
    line = file.getvalue()
    assert line.count("\n") == 1
    assert line.startswith("runs/a: ")
    assert "21.0 % ± 1.8 % → 84.0 % ± 1.6 %" in line
    assert names(line, "100 accuracy 512")


def test_the_final_report_shows_progress_and_examples() -> None:
    views = [
        EpisodeView("a", "reach 24", "4*6", 1.0, "stop", 9),
        EpisodeView("b", "reach 7", "1+1", 0.0, "stop", 9),
    ]
    report = render(final_report(build_summary(), RunView(1, Clock()), views))
    for fact in (
        "21.0 % ± 1.8 % → 84.0 % ± 1.6 %",
        "512",
        "✓",
        "4*6",
        "✗",
        "1+1",
        "93.0 %",
        "1:23",
    ):
        assert fact in report


def test_the_run_directory_is_printed_whole_however_long_it_is() -> None:
    console, file, _ = make(1)
    run_dir = "runs/" + "[b]" * 100
    console.finish(build_summary(), run_dir)
    assert file.getvalue().endswith(f"{run_dir}\n")


def test_model_text_is_shown_without_interpreting_markup_or_escapes() -> None:
    views = [EpisodeView("a", "[bold]p[/bold]", "\x1b[2Jgone\n\n[red]x", 1.0, "stop", 0)]
    report = render(final_report(build_summary(), RunView(1, Clock()), views))
    assert "\x1b" not in report
    assert "[bold]p[/bold]" in report
    assert "[red]x" in report


def test_unsolved_examples_are_shown_with_a_cross() -> None:
    report = render(final_report(build_summary(), RunView(1, Clock()), [EpisodeView("a", "p", "c", 0.0, "stop", 0)]))
    assert "✗" in report
    assert "✓" not in report


def test_ticks_and_crosses_are_shown_only_for_binary_rewards() -> None:
    views = [EpisodeView(name, "p", "c", reward, "stop", 0) for name, reward in (("a", 0.75), ("b", 1.0), ("c", -2.5))]
    report = render(final_report(build_summary(), RunView(1, Clock()), views))
    assert not {"✓", "✗"} & set(report)
    for number_shown in ("1", "0.75", "-2.5"):
        assert any(line.split()[:1] == [number_shown] for line in report.splitlines())


def test_one_step_is_written_in_the_singular() -> None:
    console, file, _ = make(1, quiet=True)
    builder = SummaryBuilder()
    builder.step(1, METRICS)
    console.finish(builder.build(wall_s=1, train_s=1, seed=0, exit=0), "runs/a")
    line = file.getvalue()
    assert line.count("\n") == 1
    assert line.startswith("runs/a: ")
    assert names(line, "1 step")
    assert "steps" not in line
    assert "→" not in line


def test_the_final_report_lists_failures_with_count_and_reason() -> None:
    builder = SummaryBuilder()
    builder.failures(
        [Failure("reward flaky", "raised ValueError: no\x1b number", 3), Failure("tool search", "timed out", 8)]
    )
    builder.failures([Failure("reward flaky", "raised ValueError: no\x1b number", 9)])
    report = render(final_report(builder.build(wall_s=1, train_s=1, seed=0, exit=0), RunView(1, Clock())))
    assert "12 × reward flaky: raised ValueError: no� number" in report
    assert report.index("reward flaky") < report.index("8 × tool search: timed out"), "the most frequent first"


def test_the_report_stays_short_with_many_distinct_failures() -> None:
    builder = SummaryBuilder()
    for number_of_reason in range(1000):
        builder.failures([Failure("rollout", f"reason {number_of_reason}")])
    summary = builder.build(wall_s=1, train_s=1, seed=0, exit=0)
    assert len(summary.failures) <= 101
    assert sum(failure.count for failure in summary.failures) == 1000
    assert render(final_report(summary, RunView(1, Clock()))).count("×") <= 6


def test_a_live_panel_on_a_terminal_is_drawn_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console, file, _ = make(3)
    console.start()
    console.step(1, METRICS)
    console.close()
    console.close()
    assert "reward" in file.getvalue()
    assert "\x1b[?25h" in file.getvalue()  # the cursor is back


def test_numbers_are_formatted_for_readers() -> None:
    assert [number(value) for value in (None, 3.0, 0.12345, 1234.5)] == ["–", "3", "0.123", "1.23e+03"]
    assert [si(value) for value in (None, 12, 1500, 2.5e6, 3e9)] == ["–", "12", "1.5k", "2.5M", "3G"]
    assert [clock_text(value) for value in (5, 65, 3665)] == ["0:05", "1:05", "1:01:05"]
    assert percent(None) == "–"
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert sparkline([]) == ""
    assert sparkline([1, 1]) == "▁▁"


def test_a_run_continues_when_its_progress_output_is_closed() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    console = ProgressConsole(10, file=Gone(), clock=Clock())
    for step in range(1, 11):
        console.step(step, METRICS)
    console.finish(build_summary(), "runs/a")
    assert console.view.step == 10
