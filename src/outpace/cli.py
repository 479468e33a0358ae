"""Command line: `outpace train | eval | play | show | export | ledger | report | serve | check-logprobs | fleet | …`.

Every error that the user can fix is one line on standard error and exits with code 2. Exit codes: 0 success, 2 bad
input, 3 stopped by a signal with a checkpoint, 4 component failed or unexpected error, 5 stalled, 130 aborted without
a checkpoint, 141 standard output closed by its reader.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import outpace
from outpace.errors import EXIT_SECOND_SIGNAL, BadInput, ComponentFailed, OutpaceError
from outpace.runtime.torchrun import refuse_torchrun, torchrun_process

if TYPE_CHECKING:
    from outpace.config.base import Section

EXIT_BROKEN_PIPE = 141
"""The shell's exit code for SIGPIPE: the reader of a pipe has closed it, as in `outpace fleet RUN | grep -q …`."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        words, settings = split_settings(sys.argv[1:] if argv is None else argv)
        arguments = _parser().parse_args(words)
        verb: Callable[[argparse.Namespace, list[str]], int] = arguments.verb
        if verb not in (train, doctor):
            refuse_torchrun(f"outpace {words[0]}" if words else "outpace")
        code = verb(arguments, settings)
        sys.stdout.flush()
        return code
    except ComponentFailed as error:
        if error.remote_traceback:
            print(error.remote_traceback.rstrip(), file=sys.stderr)
        return _print_error(error)
    except OutpaceError as error:
        return _print_error(error)
    except KeyboardInterrupt:
        print("outpace: aborted without a checkpoint", file=sys.stderr)
        return EXIT_SECOND_SIGNAL
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _stdout_closed():
            return EXIT_BROKEN_PIPE
        traceback.print_exc()
        return OutpaceError.exit_code


def _stdout_closed() -> bool:
    """Return whether standard output is the broken pipe. If so, redirect it to /dev/null so the exit flush succeeds."""
    try:
        out = sys.stdout.fileno()
    except OSError:  # not backed by a file descriptor
        return False
    poll = select.poll()
    poll.register(out, 0)
    is_broken = any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    if is_broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return is_broken


def split_settings(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `--section.key value` and `--section.key=value` from the command's own arguments."""
    words: list[str] = []
    settings: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and "." in word.partition("=")[0]:
            settings.append(word)
            if "=" not in word and rest and not rest[0].startswith("--"):
                settings.append(rest.pop(0))
        else:
            _reject_bare_setting(word)
            words.append(word)
    return words, settings


_BARE_SETTING = re.compile(r"\+*([A-Za-z][\w.-]*?)(=.*)?", re.DOTALL)


def _reject_bare_setting(word: str) -> None:
    """Reject `section.key=value` without dashes (Hydra style), which would be read as a config file name."""
    from outpace.config.load import KNOWN
    from outpace.config.other_libraries import equivalent_setting

    match = _BARE_SETTING.fullmatch(word)
    if match is None or Path(word).exists():
        return
    name, value = match[1], match[2] or ""
    if name in KNOWN:
        raise BadInput(f"{word}: settings need two leading dashes: --{name}{value or ' value'}")
    if value and (remedy := equivalent_setting(name, "--")):
        raise BadInput(f"{name}: no such setting; {remedy}")
    if value and "." in name:
        raise BadInput(f"{name}: no such setting; write settings as --section.key value")


def _print_error(error: OutpaceError) -> int:
    print(f"outpace: {error}", file=sys.stderr)
    return error.exit_code


# --------------------------------------------------------------------------------------------------------- commands


def train(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.config.load import dump_toml, load_config
    from outpace.config.validation import resolve
    from outpace.hardware.placement import missing_machines, planned_placement, visible_gpus
    from outpace.run.background import run_plan
    from outpace.run.plan import UserObjects, load_run_config, make_plan
    from outpace.run.torchrun_rank import serve_rank, with_ranks
    from outpace.runtime.die_with_parent import die_with_parent

    resumes = arguments.resume is not None
    if resumes and arguments.config is not None:
        raise BadInput(
            "--resume: the run directory already has a config; pass changes as --section.key value instead of a file"
        )
    if resumes:
        config = load_run_config(arguments.resume, [*settings, f"--run.dir={arguments.resume}"])
    else:
        config = load_config(arguments.config, settings)
    process = torchrun_process()
    if process is not None:
        config = with_ranks(config, process)
    is_controller = process is None or process.rank == 0
    if arguments.dry_run:
        resolved = resolve(config)
        if is_controller:
            placement = planned_placement(resolved, visible_gpus(resolved))
            lines = [*placement.lines(resolved), missing_machines(resolved, placement)]
            print(dump_toml(resolved), end="")
            print("\n" + "\n".join(f"# {line}" for line in lines if line))
        return 0
    if process is not None:
        if not is_controller:
            serve_rank(config, process)
        die_with_parent(number=signal.SIGTERM)  # stop as usual if torchrun is killed
    run_plan(make_plan(config, UserObjects(), arguments.quiet), resume=resumes)
    return 0


def evaluate(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.commands.evaluate import evaluate_model

    print(json.dumps(evaluate_model(arguments.run, settings, arguments.completions), indent=2))
    return 0


def play(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.commands.play import play as run_play

    run_play(arguments.config, settings, arguments.task, arguments.raw)
    return 0


def show(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.commands.show import show as print_rollouts

    _no_settings(settings)
    print_rollouts(
        arguments.run,
        step=arguments.step,
        task=arguments.task,
        outcome="failed" if arguments.failed else arguments.outcome,
        max_chars=arguments.max_chars,
    )
    return 0


def export(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.checkpoint.export import export as write_model

    _no_settings(settings)
    print(f"written to {write_model(arguments.run, arguments.directory, arguments.best, arguments.adapter)}")
    return 0


def ledger(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.controller.ledger import ledger_report

    _no_settings(settings)
    print(json.dumps(ledger_report(arguments.run), indent=2))
    return 0


def simulate(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.commands.simulate import simulate_command

    return simulate_command(arguments.config, settings, arguments.json, arguments.quiet)


def doctor(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.commands.doctor import doctor as run_checks
    from outpace.config.load import load_config
    from outpace.config.validation import resolve
    from outpace.run.torchrun_rank import with_ranks

    config, process = load_config(arguments.config, settings), torchrun_process()
    if process is not None:
        config = with_ranks(config, process)
    if process is not None and process.local_rank > 0:
        return 0  # another process checks this machine
    return run_checks(resolve(config))


def bench(arguments: argparse.Namespace, settings: list[str]) -> int:
    benchmark = importlib.import_module(_BENCHMARKS[arguments.what])
    code: int = benchmark.main([*arguments.words, *settings])
    return code


def fleet(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.monitoring.fleet_orders import FleetOrder, current_fleet, engines_json, send_orders

    _no_settings(settings)
    orders = [FleetOrder(add=url) for url in arguments.add] + [FleetOrder(remove=name) for name in arguments.remove]
    if orders:
        send_orders(arguments.run, orders, lambda line: print(f"outpace: {line}", file=sys.stderr))
    print(engines_json(current_fleet(arguments.run)))
    return 0


def serve(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.commands.serve import serve as run_servers

    run_servers(arguments.config, settings, arguments.dry_run, arguments.all_gpus)
    return 0


def check_logprobs(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.commands.logprob_check import check_logprobs as run_check

    return run_check(arguments.run, settings)


def report(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.run.reporting import send_run

    send_run(arguments.run, arguments.to, settings, lambda line: print(f"outpace: {line}", file=sys.stderr))
    return 0


def migrate(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.commands.migrate import migrate as convert

    _no_settings(settings)
    print(convert(arguments.run))
    return 0


def _no_settings(settings: list[str]) -> None:
    if settings:
        raise BadInput(f"{settings[0]}: this command takes no settings")


# ----------------------------------------------------------------------------------------------------------- parser


class _Parser(argparse.ArgumentParser):
    """Prints a usage error as one line, like every other error. Options cannot be abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"outpace: {_usage_error(message, self.prog)}", file=sys.stderr)
        raise SystemExit(2)


COMMANDS = (
    "train", "eval", "play", "show", "export", "ledger", "report", "serve", "check-logprobs", "fleet", "simulate",
    "doctor", "bench", "migrate",
)  # fmt: skip
_BENCHMARKS = {
    "end-to-end": "outpace.commands.bench_end_to_end",
    "engine": "outpace.commands.bench_engine",
    "overlap": "outpace.commands.bench_overlap",
}
_SETTINGS_EPILOG = "Also takes settings as --section.key value; `outpace train --help` lists them all."
_UNKNOWN_COMMAND = re.compile(r"argument : invalid choice: '(.*?)'")
_UNKNOWN_WORDS = re.compile(r"unrecognized arguments: (.+)")
_UNKNOWN_OPTION = re.compile(r"unrecognized arguments: --([\w-]+)")


def _usage_error(message: str, program: str) -> str:
    """Return argparse's message, or a better one with a suggestion."""
    from outpace.config.load import similar_settings
    from outpace.config.other_libraries import equivalent_setting
    from outpace.runtime.references import closest_names

    if command := _UNKNOWN_COMMAND.match(message):
        close = closest_names(command[1], COMMANDS)
        hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
        if command[1] in ("help", "version"):
            hint = f"use outpace --{command[1]}"
        return f"{command[1]}: no such command; {hint}"
    if option := _UNKNOWN_OPTION.match(message):
        if remedy := equivalent_setting(option[1], "--"):
            return f"--{option[1]}: no such option; {remedy}"
        similar = " or ".join(f"--{key}" for key in similar_settings(option[1].replace("-", "_")))
        hint = f"; did you mean {similar}?" if similar else " value"
        return f"--{option[1]}: no such option; write settings as --section.key{hint}"
    if extra := _UNKNOWN_WORDS.match(message):
        return f"{extra[1]}: unexpected argument or unknown option; `{program} --help` lists them"
    return f"{message}; see `{program} --help`"


class _DescribeSettings(argparse.Action):
    """`--help` for commands with settings: prints the options, an index of sections and every setting.

    `--help SECTION` prints the settings of one section."""

    def __init__(self, option_strings: Sequence[str], dest: str, module: str = "outpace.config.load", **_: Any) -> None:
        """`module` has the settings as `SECTIONS`."""
        super().__init__(
            option_strings,
            dest,
            nargs="?",
            metavar="SECTION",
            help="show all options and settings, or the settings of one section",
        )
        self._module = module

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, section: object, *_: object) -> None:
        from outpace.config.load import describe_settings, list_sections

        sections: Mapping[str, type[Section]] = importlib.import_module(self._module).SECTIONS
        if section is None:
            parser.print_help()
            print("\nsettings by section:\n")
            print(list_sections(sections), end="\n\n")
            print(describe_settings(sections))
            print(
                "\nWrite a setting as `--section.key value` on the command line, or as `key = value` under `[section]`"
            )
            print(f"in a TOML or YAML file. `{parser.prog} --help SECTION` shows one section: {', '.join(sections)}.")
        elif section in sections:
            print(describe_settings({str(section): sections[str(section)]}))
        else:
            raise BadInput(f"--help {section}: no such section; the sections are {', '.join(sections)}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="outpace", description="Asynchronous reinforcement learning for language models and agents.")
    parser.add_argument("--version", action="version", version=f"outpace {outpace.__version__}")

    def overview(*_: object) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(verb=overview)
    commands = parser.add_subparsers(title="commands", metavar="", parser_class=_Parser)
    _add_model_commands(commands)
    _add_run_commands(commands)
    _add_engine_commands(commands)
    _add_tool_commands(commands)
    return parser


def _add_model_commands(commands: argparse._SubParsersAction[_Parser]) -> None:
    """Add `train`, `eval` and `play`."""
    this = commands.add_parser("train", help="train a model", add_help=False)
    this.add_argument("config", nargs="?", type=Path, help="TOML or YAML file (default: the built-in task)")
    this.add_argument("--resume", type=Path, metavar="RUN", help="resume a run from its newest complete checkpoint")
    this.add_argument("--dry-run", action="store_true", help="print the resolved config and the placement, and exit")
    this.add_argument("--quiet", action="store_true", help="print only the result")
    this.add_argument("-h", "--help", action=_DescribeSettings)
    this.set_defaults(verb=train)

    this = commands.add_parser("eval", help="evaluate a model or a run on held-out tasks", epilog=_SETTINGS_EPILOG)
    this.add_argument("run", nargs="?", type=Path, help="run directory (default: evaluate --model.path)")
    this.add_argument(
        "--completions", type=Path, metavar="FILE", help="write prompts, completions and rewards as JSONL"
    )
    this.set_defaults(verb=evaluate)

    this = commands.add_parser("play", help="answer tasks yourself, in place of the model", epilog=_SETTINGS_EPILOG)
    this.add_argument("config", nargs="?", type=Path, help="TOML or YAML file (default: the built-in task)")
    this.add_argument("--task", metavar="INDEX|ID", help="first task (default: random, seeded by run.seed)")
    this.add_argument("--raw", action="store_true", help="show the prompt as the text the model receives")
    this.set_defaults(verb=play)


def _add_run_commands(commands: argparse._SubParsersAction[_Parser]) -> None:
    """Add the commands for a run directory: `show`, `export`, `ledger`, `report` and `migrate`."""
    this = commands.add_parser("show", help="print a run's rollouts: prompts, completions, rewards")
    this.add_argument("run", type=Path, help="run directory; the run may still be active")
    this.add_argument("--step", type=int, metavar="N", help="only this step (default: the newest)")
    this.add_argument("--task", metavar="INDEX|ID", help="only this task, in all steps")
    chosen = this.add_mutually_exclusive_group()
    chosen.add_argument("--outcome", choices=("trained", "filtered", "failed", "dropped"), help="only this outcome")
    chosen.add_argument("--failed", action="store_true", help="same as --outcome failed")
    this.add_argument(
        "--max-chars", type=int, default=2000, metavar="N", help="characters to print per turn; 0 prints all"
    )
    this.set_defaults(verb=show)

    this = commands.add_parser("export", help="write a run's model as a Hugging Face directory")
    this.add_argument("run", type=Path, help="run directory or one of its checkpoints")
    this.add_argument("directory", type=Path, help="output directory; must not exist yet, or be empty")
    this.add_argument(
        "--best", action="store_true", help="export the checkpoint with the best held-out reward, not the newest"
    )
    this.add_argument("--adapter", action="store_true", help="export only the LoRA adapter (PEFT), not the whole model")
    this.set_defaults(verb=export)

    this = commands.add_parser("ledger", help="print the outcome counts of a run's tasks as JSON")
    this.add_argument("run", type=Path, help="run directory")
    this.set_defaults(verb=ledger)

    this = commands.add_parser("report", help="send a run to experiment trackers", epilog=_SETTINGS_EPILOG)
    this.add_argument("run", type=Path, help="run directory; the run may still be active")
    this.add_argument(
        "--to", metavar="TRACKER", action="append", default=[], help="only this tracker (default: run.report_to)"
    )
    this.set_defaults(verb=report)

    this = commands.add_parser("migrate", help="convert a run directory of an earlier format")
    this.add_argument("run", type=Path, help="run directory; no run may be active in it")
    this.set_defaults(verb=migrate)


def _add_engine_commands(commands: argparse._SubParsersAction[_Parser]) -> None:
    """Add `serve`, `check-logprobs` and `fleet`."""
    this = commands.add_parser("serve", help="start inference servers for later runs", epilog=_SETTINGS_EPILOG)
    this.add_argument("config", nargs="?", type=Path, help="a run's TOML or YAML file (default: the built-in model)")
    this.add_argument("--dry-run", action="store_true", help="print the server commands and exit")
    this.add_argument("--all-gpus", action="store_true", help="use all GPUs: the learner runs on another machine")
    this.set_defaults(verb=serve)

    this = commands.add_parser(
        "check-logprobs", help="compare sampler and learner logprobs on the same tokens", epilog=_SETTINGS_EPILOG
    )
    this.add_argument("run", nargs="?", type=Path, help="run directory (default: check --model.path)")
    this.set_defaults(verb=check_logprobs)

    this = commands.add_parser("fleet", help="list, add or remove engines of an active run")
    this.add_argument("run", type=Path, help="run directory")
    this.add_argument(
        "--add", metavar="URL", action="append", default=[], help="add a running server; empty: the run launches one"
    )
    this.add_argument("--remove", metavar="ENGINE", action="append", default=[], help="remove an engine")
    this.set_defaults(verb=fleet)


def _add_tool_commands(commands: argparse._SubParsersAction[_Parser]) -> None:
    """Add `simulate`, `doctor` and `bench`."""
    this = commands.add_parser("simulate", help="simulate a cluster on a virtual clock", add_help=False)
    this.add_argument("-h", "--help", action=_DescribeSettings, module="outpace.simulator.settings")
    this.add_argument("config", nargs="?", type=Path, help="TOML or YAML file (default: an example cluster)")
    this.add_argument("--json", action="store_true", help="print JSON")
    this.add_argument("--quiet", action="store_true", help="print only the result")
    this.set_defaults(verb=simulate)

    this = commands.add_parser("doctor", help="check this machine", epilog=_SETTINGS_EPILOG)
    this.add_argument("config", nargs="?", type=Path, help="a run's TOML or YAML file (default: the default settings)")
    this.set_defaults(verb=doctor)

    this = commands.add_parser("bench", help="run a benchmark")
    this.add_argument("what", choices=tuple(_BENCHMARKS))
    this.add_argument("words", nargs=argparse.REMAINDER, help="options of the benchmark and settings of its runs")
    this.set_defaults(verb=bench)


if __name__ == "__main__":
    sys.exit(main())
