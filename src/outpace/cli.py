"""One verb per job: `outpace train | eval | play | export | ledger | serve | agree | fleet | simulate | doctor | …`.

Every error that the user can mend is one line on standard error and exit code 2. Exit codes: 0 done, 2 bad input,
3 stopped by a signal with a checkpoint, 4 a part failed or something unforeseen happened, 5 stalled, 130 left at once
without one, 141 whoever read the output has gone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import outpace
from outpace.errors import EXIT_LEFT_AT_ONCE, BadInput, OutpaceError, PartFailed

if TYPE_CHECKING:
    from outpace.config.section import Section

EXIT_NOBODY_READS = 141
"""As a shell calls the end by SIGPIPE: `outpace fleet RUN | grep -q …` has seen enough."""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        words, settings = split_settings(sys.argv[1:] if argv is None else argv)
        arguments = _parser().parse_args(words)
        verb: Callable[[argparse.Namespace, list[str]], int] = arguments.verb
        code = verb(arguments, settings)
        sys.stdout.flush()
        return code
    except PartFailed as error:
        if error.remote_traceback:
            print(error.remote_traceback.rstrip(), file=sys.stderr)
        return _complain(error)
    except OutpaceError as error:
        return _complain(error)
    except KeyboardInterrupt:
        print("outpace: left at once, without a checkpoint", file=sys.stderr)
        return EXIT_LEFT_AT_ONCE
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return EXIT_NOBODY_READS
        traceback.print_exc()
        return OutpaceError.exit_code


def _nobody_reads() -> bool:
    """Whether standard output is the pipe that broke; then nothing more is written to it, also not at exit."""
    try:
        out = sys.stdout.fileno()
    except OSError:  # it is no file
        return False
    look = select.poll()
    look.register(out, 0)
    is_broken = any(events & (select.POLLERR | select.POLLHUP) for _, events in look.poll(0))
    if is_broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return is_broken


def split_settings(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Set `--section.key value` and `--section.key=value` apart from the command's own words."""
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
            _refuse_bare_setting(word)
            words.append(word)
    return words, settings


BARE_SETTING = re.compile(r"\+*([A-Za-z][\w.-]*?)(=.*)?", re.DOTALL)


def _refuse_bare_setting(word: str) -> None:
    """`section.key=value` without dashes, as Hydra writes settings, would be taken for the name of a config file."""
    from outpace.config.equivalents import equivalent
    from outpace.config.loading import FIELDS

    match = BARE_SETTING.fullmatch(word)
    if match is None or Path(word).exists():
        return
    name, value = match[1], match[2] or ""
    if name in FIELDS:
        raise BadInput(f"{word}: a setting needs two dashes before it: --{name}{value or ' value'}")
    if value and (remedy := equivalent(name, "--")):
        raise BadInput(f"{name}: no such setting; {remedy}")
    if value and "." in name:
        raise BadInput(f"{name}: no such setting; settings are written --section.key value")


def _complain(error: OutpaceError) -> int:
    print(f"outpace: {error}", file=sys.stderr)
    return error.exit_code


# ------------------------------------------------------------------------------------------------------------ verbs


def train(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.background import run_plan
    from outpace.config.loading import dump_toml, load_config
    from outpace.config.rules import resolve
    from outpace.placement import placement_of
    from outpace.planning import Objects, config_of_run, make_plan

    resumes = arguments.resume is not None
    if resumes and arguments.config is not None:
        raise BadInput("--resume: a run brings its own config; give changes as --section.key value")
    if resumes:
        config = config_of_run(arguments.resume, [*settings, f"--run.dir={arguments.resume}"])
    else:
        config = load_config(arguments.config, settings)
    if arguments.dry_run:
        resolved = resolve(config)
        print(dump_toml(resolved), end="")
        print("\n" + "\n".join(f"# {line}" for line in placement_of(resolved).lines()))
        return 0
    run_plan(make_plan(config, Objects(), arguments.quiet), resume=resumes)
    return 0


def evaluate(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.evaluate import evaluate_model

    print(json.dumps(evaluate_model(arguments.run, settings), indent=2))
    return 0


def play(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.play import play as take_a_seat

    take_a_seat(arguments.config, settings, arguments.task, arguments.raw)
    return 0


def show(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.observe.show import show as print_rollouts

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
    from outpace.checkpoint.export import export as write

    _no_settings(settings)
    print(f"written to {write(arguments.run, arguments.directory, arguments.best, arguments.adapter)}")
    return 0


def ledger(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.pipeline.account import account_of

    _no_settings(settings)
    print(json.dumps(account_of(arguments.run), indent=2))
    return 0


def simulate(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.simulate import command

    return command.main(arguments.config, settings, arguments.json, arguments.quiet)


def doctor(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.config.loading import load_config
    from outpace.config.rules import resolve
    from outpace.observe.doctor import doctor as examine

    return examine(resolve(load_config(arguments.config, settings)))


def bench(arguments: argparse.Namespace, settings: list[str]) -> int:
    benchmark = importlib.import_module(f"outpace.bench.{arguments.what}")
    code: int = benchmark.main([*arguments.words, *settings])
    return code


def fleet(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.observe.fleet import Order
    from outpace.observe.fleet_orders import current, order_all, shown

    _no_settings(settings)
    orders = [Order(add=url) for url in arguments.add] + [Order(remove=name) for name in arguments.remove]
    if orders:
        order_all(arguments.run, orders, lambda line: print(f"outpace: {line}", file=sys.stderr))
    print(shown(current(arguments.run)))
    return 0


def serve(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.serve import serve as start

    start(arguments.config, settings, arguments.dry_run)
    return 0


def agree(arguments: argparse.Namespace, settings: list[str]) -> int:
    from outpace.agree import agree as compare

    return compare(arguments.run, settings)


def _no_settings(settings: list[str]) -> None:
    if settings:
        raise BadInput(f"{settings[0]}: this command takes no such option")


# ----------------------------------------------------------------------------------------------------------- parser


class _Parser(argparse.ArgumentParser):
    """One line for a usage error, as for every other one."""

    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"outpace: {_improved(message, self.prog)}", file=sys.stderr)
        raise SystemExit(2)


COMMANDS = (
    "train", "eval", "play", "show", "export", "ledger", "serve", "agree", "fleet", "simulate", "doctor", "bench",
)  # fmt: skip
SETTINGS_TOO = "Settings are taken as --section.key value; `outpace train --help` lists them all."
UNKNOWN_COMMAND = re.compile(r"argument : invalid choice: '(.*?)'")
UNKNOWN_WORDS = re.compile(r"unrecognized arguments: (.+)")
UNKNOWN_OPTION = re.compile(r"unrecognized arguments: --([\w-]+)")


def _improved(message: str, program: str) -> str:
    """argparse's complaint, or a better one where we know what may have been meant."""
    from outpace.config.equivalents import equivalent
    from outpace.config.loading import settings_like
    from outpace.references import nearest

    if command := UNKNOWN_COMMAND.match(message):
        close = nearest(command[1], COMMANDS)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        if command[1] in ("help", "version"):
            hint = f"write outpace --{command[1]}"
        return f"no command {command[1]}; {hint}"
    if option := UNKNOWN_OPTION.match(message):
        if remedy := equivalent(option[1], "--"):
            return f"--{option[1]}: no such option; {remedy}"
        meant = " or ".join(f"--{key}" for key in settings_like(option[1].replace("-", "_")))
        hint = f"; did you mean {meant}?" if meant else " value"
        return f"--{option[1]}: no such option; settings are written --section.key{hint}"
    if extra := UNKNOWN_WORDS.match(message):
        return f"{extra[1]}: one argument too many, or an unknown option; `{program} --help` shows what there is"
    return f"{message}; `{program} --help` shows how it is written"


class _DescribeSettings(argparse.Action):
    """`--help` of a command with settings: the command, an index of the sections, every setting. `--help SECTION`
    prints the settings of one section."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: object) -> None:
        super().__init__(
            option_strings, dest, nargs="?", metavar="SECTION", help="show every option and setting, or one section's"
        )

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, section: object, *_: object) -> None:
        from outpace.config.loading import describe, index

        sections = self.sections()
        if section is None:
            parser.print_help()
            print("\nsections of settings:\n")
            print(index(sections), end="\n\n")
            print(describe(sections))
            print("\nA setting is `--section.key value` on the command line, or `key = value` under `[section]` in a")
            print(f"TOML or YAML file. `{parser.prog} --help SECTION` shows one section: {', '.join(sections)}.")
        elif section in sections:
            print(describe({str(section): sections[str(section)]}))
        else:
            raise BadInput(f"--help {section}: no such section; the sections are {', '.join(sections)}")
        parser.exit()

    def sections(self) -> Mapping[str, type[Section]]:
        from outpace.config.loading import SECTIONS

        return SECTIONS


class _DescribeSimulation(_DescribeSettings):
    """`outpace simulate --help`: the settings are another set."""

    def sections(self) -> Mapping[str, type[Section]]:
        from outpace.simulate.loading import SECTIONS

        return SECTIONS


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="outpace",
        description="Asynchronous reinforcement learning for language models and agents.",
        allow_abbrev=False,
    )

    parser.add_argument("--version", action="version", version=f"outpace {outpace.__version__}")

    def overview(*_: object) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(verb=overview)
    verbs = parser.add_subparsers(title="commands", metavar="", parser_class=_Parser)

    this = verbs.add_parser("train", help="train a model", add_help=False, allow_abbrev=False)
    this.add_argument("config", nargs="?", type=Path, help="a TOML or YAML file; without one, the built-in task")
    this.add_argument("--resume", type=Path, metavar="RUN", help="go on from a run's newest complete checkpoint")
    this.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    this.add_argument("--quiet", action="store_true", help="print the result only")
    this.add_argument("-h", "--help", action=_DescribeSettings)
    this.set_defaults(verb=train)

    this = verbs.add_parser(
        "eval", help="measure held-out reward of a model or a run", epilog=SETTINGS_TOO, allow_abbrev=False
    )
    this.add_argument("run", nargs="?", type=Path, help="a run directory; without one, --model.path")
    this.set_defaults(verb=evaluate)

    this = verbs.add_parser("play", help="take the model's seat in a task", epilog=SETTINGS_TOO, allow_abbrev=False)
    this.add_argument("config", nargs="?", type=Path, help="a TOML or YAML file; without one, the built-in task")
    this.add_argument("--task", metavar="INDEX|ID", help="which one first; without this, drawn by run.seed")
    this.add_argument("--raw", action="store_true", help="show the prompt as the text that the model gets")
    this.set_defaults(verb=play)

    this = verbs.add_parser("show", help="print a run's rollouts: prompts, answers, rewards", allow_abbrev=False)
    this.add_argument("run", type=Path, help="a run directory; the run may be under way")
    this.add_argument("--step", type=int, metavar="N", help="of this step; without one, the newest")
    this.add_argument("--task", metavar="INDEX|ID", help="of this task, in all steps")
    chosen = this.add_mutually_exclusive_group()
    chosen.add_argument("--outcome", choices=("trained", "filtered", "failed", "dropped"), help="these only")
    chosen.add_argument("--failed", action="store_true", help="the same as --outcome failed")
    this.add_argument("--max-chars", type=int, default=2000, metavar="N", help="of each turn; 0: the whole text")
    this.set_defaults(verb=show)

    this = verbs.add_parser("export", help="write a run's model as a Hugging Face directory", allow_abbrev=False)
    this.add_argument("run", type=Path, help="a run directory or one of its checkpoints")
    this.add_argument("directory", type=Path, help="where to; must not exist yet")
    this.add_argument(
        "--best", action="store_true", help="the checkpoint with the best held-out reward, not the newest"
    )
    this.add_argument("--adapter", action="store_true", help="the trained adapters (PEFT), not the model they make")
    this.set_defaults(verb=export)

    this = verbs.add_parser("ledger", help="account for every task of a run, as JSON", allow_abbrev=False)
    this.add_argument("run", type=Path, help="a run directory")
    this.set_defaults(verb=ledger)

    this = verbs.add_parser("serve", help="start inference servers by hand", epilog=SETTINGS_TOO, allow_abbrev=False)
    this.add_argument("config", nargs="?", type=Path, help="a run's TOML or YAML file; without one, the built-in model")
    this.add_argument("--dry-run", action="store_true", help="print the commands that would be run, and stop")
    this.set_defaults(verb=serve)

    this = verbs.add_parser(
        "agree", help="hold engines and learner against each other", epilog=SETTINGS_TOO, allow_abbrev=False
    )
    this.add_argument("run", nargs="?", type=Path, help="a run directory; without one, --model.path")
    this.set_defaults(verb=agree)

    this = verbs.add_parser("fleet", help="the engines of a run that is under way", allow_abbrev=False)
    this.add_argument("run", type=Path, help="a run directory")
    this.add_argument(
        "--add", metavar="URL", action="append", default=[], help="let a server join; empty: have the run start one"
    )
    this.add_argument("--remove", metavar="ENGINE", action="append", default=[], help="let an engine leave")
    this.set_defaults(verb=fleet)

    this = verbs.add_parser("simulate", help="a cluster, on a virtual clock", add_help=False, allow_abbrev=False)
    this.add_argument("-h", "--help", action=_DescribeSimulation)
    this.add_argument("config", nargs="?", type=Path, help="a TOML or YAML file; without one, a cluster to look at")
    this.add_argument("--json", action="store_true", help="print JSON")
    this.add_argument("--quiet", action="store_true", help="print the result only")
    this.set_defaults(verb=simulate)

    this = verbs.add_parser("doctor", help="check this machine", epilog=SETTINGS_TOO, allow_abbrev=False)
    this.add_argument("config", nargs="?", type=Path, help="a run's TOML or YAML file; without one, the defaults")
    this.set_defaults(verb=doctor)

    this = verbs.add_parser("bench", help="measure against the limit", allow_abbrev=False)
    this.add_argument(
        "what", choices=("checkpoint", "controller", "engine", "episodes", "learner", "memory", "overlap", "publish")
    )
    this.add_argument("words", nargs=argparse.REMAINDER, help="options of the benchmark, settings of its runs")
    this.set_defaults(verb=bench)
    return parser


if __name__ == "__main__":
    sys.exit(main())
