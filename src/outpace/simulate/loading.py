"""MERGED"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pydantic
from pydantic.fields import FieldInfo

from outpace.config.files import read_file
from outpace.config.loading import parse_arguments
from outpace.config.section import Section
from outpace.errors import BadInput, one_line
from outpace.references import nearest
from outpace.simulate.settings import SimulationSettings


def _sections() -> dict[str, type[Section]]:
    sections = {name: info.annotation for name, info in SimulationSettings.model_fields.items()}
    return {name: section for name, section in sections.items() if isinstance(section, type)}


SECTIONS = _sections()
FIELDS: dict[str, FieldInfo] = {
    f"{name}.{key}": info for name, section in SECTIONS.items() for key, info in section.model_fields.items()
}


def load_settings(file: Path | None = None, words: Sequence[str] = ()) -> SimulationSettings:
    """Load settings from an optional file and the command line. The command line overrides the file."""
    flat = {**(_flat(read_file(file)) if file is not None else {}), **parse_arguments(words, FIELDS, _unknown)}
    nested: dict[str, dict[str, Any]] = {}
    for dotted, value in flat.items():
        section, _, key = dotted.partition(".")
        nested.setdefault(section, {})[key] = value
    try:
        settings = SimulationSettings.model_validate(nested)
    except pydantic.ValidationError as error:
        raise BadInput(_explain(error)) from None
    _check(settings)
    return settings


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, values in content.items():
        if name not in SECTIONS:
            raise _unknown(str(name))
        if not isinstance(values, Mapping):
            raise BadInput(f"{name}: is a section, not a single setting; set its keys instead")
        flat |= {f"{name}.{key}": value for key, value in values.items()}
    for dotted in flat:
        if dotted not in FIELDS:
            raise _unknown(dotted)
    return {dotted: _int_to_float(dotted, value) for dotted, value in flat.items()}


def _int_to_float(dotted: str, value: Any) -> Any:
    """Accept integers for float settings: TOML distinguishes 4 and 4.0."""
    wanted = FIELDS[dotted].annotation
    is_number = wanted is float or float in get_args(wanted)
    return float(value) if is_number and type(value) is int else value


def _unknown(dotted: str) -> BadInput:
    _, dot, last = dotted.rpartition(".")
    same = [key for key in FIELDS if key.rpartition(".")[2] == last]
    close = same or nearest(dotted, FIELDS if dot else SECTIONS)
    hint = f"did you mean {' or '.join(close)}?" if close else f"the sections are {', '.join(SECTIONS)}"
    return BadInput(f"{one_line(dotted)}: no such {'setting' if dot else 'section'} of a simulation; {hint}")


def _explain(error: pydantic.ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"][:2])
    problem = first["msg"].replace("Input should", "should", 1)
    return f"{key}: {one_line(problem)}, not {one_line(repr(first['input']), limit=60)}"


def _check(settings: SimulationSettings) -> None:
    """Reject invalid combinations of settings."""
    cluster, workload, pacing = settings.cluster, settings.workload, settings.pacing
    if cluster.training is not None and cluster.devices - cluster.training < cluster.per_engine:
        raise BadInput(
            f"cluster.training: {cluster.training} of {cluster.devices} devices leave too few for one engine with "
            f"cluster.per_engine = {cluster.per_engine}; lower it"
        )
    if cluster.devices <= cluster.per_engine:
        raise BadInput(
            f"cluster.devices: {cluster.devices} are too few for a learner and an engine with cluster.per_engine = "
            f"{cluster.per_engine}; raise it"
        )
    if workload.lengths == "list" and not workload.length_list:
        raise BadInput('workload.length_list: is empty, but workload.lengths = "list" draws from it; add lengths')
    if workload.length_list and min(workload.length_list) < 1:
        raise BadInput(f"workload.length_list: contains {min(workload.length_list)}; use lengths of at least 1")
    if workload.filtered + workload.failed >= 1:
        raise BadInput("workload.failed: workload.filtered and this leave no groups to train on; lower one")
    if pacing.max_lag < settings.weights.every - 1:
        raise BadInput(
            f"weights.every: publishing every {settings.weights.every} steps needs pacing.max_lag >= "
            f"{settings.weights.every - 1}, not {pacing.max_lag}"
        )
    if settings.run.deterministic and (pacing.on_stale != "wait" or settings.weights.update != "inflight"):
        raise BadInput('run.deterministic: needs pacing.on_stale = "wait" and weights.update = "inflight"')
