"""Checks the documentation against the code: names exist, links resolve, examples parse."""

from __future__ import annotations

import inspect
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import outpace
from outpace import cli, errors
from outpace.algorithms import ADVANTAGES, MASKS, NORMALIZERS, POLICY_LOSSES
from outpace.algorithms.corrections import RATIO_BINS
from outpace.algorithms.registry import Aggregation, Credit, OldPolicy
from outpace.compat import rllm
from outpace.config.algorithm import weight_settings
from outpace.config.load import FIELDS, KNOWN, SECTIONS, make_config, parse_arguments
from outpace.config.other_libraries import RENAMED
from outpace.config.presets import PRESETS
from outpace.config.rllm_settings import MIRRORED, SAME
from outpace.monitoring.callbacks import Callback
from outpace.monitoring.metric_table import BUILT_IN
from outpace.runtime.registry import REGISTRIES
from outpace.simulator import settings as simulation
from support import resolved

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "outpace"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)

FILE_ENDINGS = ("json", "jsonl", "lock", "log", "md", "py", "safetensors", "toml")
"""Suffixes that follow a section's name without being a setting: `model.safetensors`, `run.lock`."""

RLLM = {".".join(name.split(".")[:2]) for names in (SAME, MIRRORED) for name in names}
"""Settings of rLLM, whose page lists them."""

SERVER_FILES = ("vllm.toml", "one_node.toml", "many_nodes.toml")
"""Config files in examples/ that set `engine.kind = "vllm"`."""

KEY = re.compile(rf"(?<![\w./-])(?:--)?({'|'.join(SECTIONS)})\.(\w+)\b")


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(name: str, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(text_of(name)) if language in languages]


def spans(name: str) -> list[str]:
    return SPAN.findall(FENCE.sub("", text_of(name)))


def commands(name: str) -> Iterator[str]:
    """Every `outpace …` of a shell block or of inline code, without comments."""
    lines = [line for block in blocks(name, "bash") for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *spans(name)]:
        command = line.partition(" # ")[0].strip()
        if command.startswith("outpace "):
            yield command


def benchmark_options(what: str) -> set[str]:
    """Option names, read from the source because importing a benchmark loads torch."""
    text = (SOURCE / "commands" / f"bench_{what.replace('-', '_')}.py").read_text()
    declared = re.findall(r'add(?:_argument)?\("--([\w-]+)"', text)
    defaults = re.search(r"take_options\(\w+, \{(.*?)\}\)", text)
    return {*declared, *(name.replace("_", "-") for name in re.findall(r'"(\w+)":', defaults[1] if defaults else ""))}


def test_there_are_documents_with_commands_in_them() -> None:
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/architecture.md"} <= set(NAMES)
    assert len([command for name in NAMES for command in commands(name)]) > 30


@pytest.mark.parametrize("name", NAMES)
def test_every_documented_command_parses(name: str) -> None:
    for command in commands(name):
        assert_parses(shlex.split(command)[1:])


def assert_parses(given: list[str]) -> None:
    """Check the words after `outpace`."""
    words, settings = cli.split_settings(given)
    if (len(words) == 1 and not settings) or "--help" in words:  # the name of a command alone
        assert_has_help(words[0])
        return
    arguments = cli._parser().parse_args(words)
    if words[0] == "simulate":
        simulation.load_settings(None, settings)
        return
    is_server = words[0] == "serve" or any(word.endswith(SERVER_FILES) for word in words)
    served = {"engine.kind": "vllm"} if is_server else {}  # what these imply
    make_config(served | parse_arguments(settings))
    options = {word[2:].partition("=")[0] for word in getattr(arguments, "words", []) if word.startswith("--")}
    assert not options or options <= benchmark_options(arguments.what), given


def assert_has_help(verb: str) -> None:
    with pytest.raises(SystemExit) as left:
        cli._parser().parse_args([verb, "--help"])
    assert left.value.code in (None, 0), verb


@pytest.mark.parametrize("name", NAMES)
def test_every_documented_setting_exists(name: str) -> None:
    code = [*spans(name), *(body for _, body in FENCE.findall(text_of(name)))]
    named = [match for text in code for match in KEY.findall(text) if match[1] not in FILE_ENDINGS]
    unknown = {f"{section}.{key}" for section, key in named} - (set(KNOWN) | simulated_settings(name))
    unknown -= RLLM if name == "docs/from_rllm.md" else set()
    refused = {"pacing.maxlag"}  # shown as an example of what is refused
    own = {"policy_loss.floor", "correction.longest"}  # of functions in examples
    assert unknown <= refused | own | set(RENAMED)


def simulated_settings(name: str) -> set[str]:
    """The simulator's page documents the simulator's own settings."""
    return set(simulation.FIELDS) if name == "docs/simulator.md" else set()


@pytest.mark.parametrize("name", NAMES)
def test_every_toml_block_is_a_valid_config(name: str, tmp_path: Path) -> None:
    for block in blocks(name, "toml"):
        if simulated_settings(name):
            file = tmp_path / "cluster.toml"
            file.write_text(block)
            simulation.load_settings(file)
        else:
            make_config(tomllib.loads(block))


def test_the_configuration_page_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "configuration_docs.py"))
    page = text_of("docs/configuration.md")
    assert page == script["generate"](), "run python scripts/configuration_docs.py"
    assert sorted(re.findall(r"^\| `(\w+\.\w+)` \|", page, re.MULTILINE)) == sorted(KNOWN)


def test_the_metrics_page_is_up_to_date_and_has_a_row_for_every_metric() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "metric_docs.py"))
    page = text_of("docs/metrics.md")
    assert page == script["generate"](), "run python scripts/metric_docs.py"
    assert set(BUILT_IN) <= set(spans("docs/metrics.md"))
    assert all(metric.meaning and metric.source for metric in BUILT_IN.values())


def test_the_table_of_rllms_settings_is_up_to_date_and_its_page_lists_every_name() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "rllm_docs.py"))
    assert text_of("docs/from_rllm.md") == script["generate"](), "run python scripts/rllm_docs.py"
    assert set(rllm.__all__) <= set(re.findall(r"\w+", text_of("docs/from_rllm.md")))


def test_help_lists_every_built_in_loss_estimator_normalizer_and_mask() -> None:
    for registry in (POLICY_LOSSES, ADVANTAGES, NORMALIZERS, MASKS):
        words = set(re.findall(r"\w+", FIELDS[registry.setting].description or ""))
        assert set(registry.built_in) <= words, registry.setting


def _as_toml(value: object) -> str:
    """Return a default in TOML notation, as the table of the README writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def test_defaults_in_the_readme_match_the_code() -> None:
    rows = re.findall(r"^\| `(\w+\.\w+)` \| `?([\w.-]+)`? \|", text_of("README.md"), re.MULTILINE)
    assert len(rows) > 5
    assert dict(rows) == {key: _as_toml(FIELDS[key].default).strip('"') for key, _ in rows}


@pytest.mark.parametrize("name", NAMES)
def test_every_link_resolves(name: str) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", text_of(name))):
        place, _, anchor = target.partition("#")
        if place.startswith(("http://", "https://")):
            continue
        path = (ROOT / name).parent / place if place else ROOT / name
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def anchors(path: Path) -> set[str]:
    """The anchors that a Markdown page has: its headings in lower case, punctuation gone, spaces as dashes."""
    headings = HEADING.findall(FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_package_and_root_module_is_in_the_architecture_page() -> None:
    named = set(spans("docs/architecture.md"))
    packages = {f"{path.parent.name}/" for path in SOURCE.glob("*/__init__.py")}
    modules = {path.name for path in SOURCE.glob("*.py")} - {"__init__.py"}
    assert packages | modules <= named


@pytest.mark.parametrize("name", NAMES)
def test_every_documented_repository_path_exists(name: str) -> None:
    paths = [text for text in spans(name) if re.fullmatch(r"(?:src|tests|examples|scripts|docs)/[\w./-]+", text)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_documented_make_target_exists(name: str) -> None:
    lines = [line for block in blocks(name, "bash") for line in block.splitlines()]
    named = {match[1] for text in [*spans(name), *lines] if (match := re.match(r"make (\w+)", text))}
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("name", NAMES)
def test_python_blocks_compile(name: str) -> None:
    for number, block in enumerate(blocks(name, "python")):
        compile(block, f"{name}, block {number}", "exec")


def test_every_exit_code_is_documented() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.OutpaceError)]
    codes = {kind.exit_code for kind in kinds} | {0, cli.EXIT_SECOND_SIGNAL}
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", text_of("docs/running.md"), re.MULTILINE)}
    assert codes <= documented


def test_the_whole_public_api_is_in_the_python_api_page() -> None:
    text = text_of("docs/python_api.md")
    parameters = set(inspect.signature(outpace.Trainer).parameters) - {"others"}  # names that are refused
    hooks = {name for name in vars(Callback) if name.startswith("on_")}
    assert {name for name in {*outpace.__all__, *parameters, *hooks} if f"`{name}" not in text} == set()


# ------------------------------------------------------------------------------------------------------- algorithms

ALGORITHMS = "docs/algorithms.md"
PRESET_ROW = re.compile(r"^\| `(\w+)` \|((?:[^|\n]*\|){7})$", re.MULTILINE)


def test_every_built_in_algorithm_choice_is_on_the_algorithms_page() -> None:
    built_in = {name for registry in (POLICY_LOSSES, ADVANTAGES, NORMALIZERS, MASKS) for name in registry.built_in}
    choices = {*get_args(OldPolicy), *get_args(Aggregation), *get_args(Credit)}
    assert built_in | choices | set(PRESETS) <= set(spans(ALGORITHMS))


def test_every_algorithm_setting_is_on_the_algorithms_page() -> None:
    sections = (
        "algorithm",
        "policy_loss",
        "advantage",
        "correction",
        "kl",
        "critic",
        "filter",
        "difficulty",
        "replay",
        "reroll",
        "governor",
    )
    settings = {key for key in KNOWN if key.partition(".")[0] in sections}
    named = {f"{section}.{key}" for text in spans(ALGORITHMS) for section, key in KEY.findall(text)}
    assert settings - named - {"governor.enabled"} == set()


def test_every_algorithm_metric_is_on_the_algorithms_page() -> None:
    prefixes = (
        "offpolicy/",
        "loss/",
        "kl",
        "entropy",
        "grad_norm",
        "learning_rate",
        "clip_ratio",
        "lag/",
        "governor/",
        "replay/",
        "reroll/",
        "difficulty/",
    )
    metrics = {name for name in BUILT_IN if name.startswith(prefixes) and "<" not in name}
    assert metrics | {f"offpolicy/{name}" for name in RATIO_BINS} <= set(spans(ALGORITHMS))


def test_the_preset_table_matches_the_resolved_presets() -> None:
    documented = {
        name: [cell.strip() for cell in cells.split("|")[:-1]]
        for name, cells in PRESET_ROW.findall(text_of(ALGORITHMS))
    }
    assert documented == {name: _cells_of_preset(name) for name in PRESETS}


def _cells_of_preset(name: str) -> list[str]:
    config = resolved({"algorithm.preset": name})
    policy_loss, advantage, correction = config.policy_loss, config.advantage, config.correction
    normalizer = "" if advantage.normalizer == "none" else f", `{advantage.normalizer}`"
    cap = weight_settings(correction).get("cap")
    capped = f", cap {cap:g}" if cap else ", no cap"
    return [
        f"`{policy_loss.name}`",
        str(policy_loss.old_policy),
        f"`{advantage.name}`{normalizer}",
        str(policy_loss.aggregation),
        "none" if correction.weight == "none" else f"{correction.weight}{capped}",
        ", ".join(f"`{mask}`" for mask in correction.masks or []),
        "yes" if config.learner.stream else "no",
    ]


def test_every_dependency_and_extra_is_explained() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    required = {re.split(r"[<>=]", dependency)[0] for dependency in project["dependencies"]}
    extras = set(project["optional-dependencies"]) - {"dev"}
    assert required | extras <= set(spans("docs/dependencies.md"))


def test_the_page_on_extending_has_a_row_for_every_registry() -> None:
    rows = [line for line in text_of("docs/extending.md").splitlines() if "`@outpace." in line]
    assert sorted(rows) == sorted(
        f"| {kind.word} | {', '.join(f'`{setting}`' for setting in kind.settings)} | `@outpace.{kind.decorator}` | "
        f"`{kind.group}` | `{kind.signature}` |"
        for kind in REGISTRIES
    )
