"""The datasets of an Axolotl file as tasks: `tasks.name` is `open_tasks`, `tasks.options` the content of the file.

datasets[i].path ─▶ rows ─▶ transform that datasets[i].type names ─▶ rows with a prompt ─▶ tasks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from outpace.config import Config
from outpace.errors import BadInput, one_line
from outpace.models.loading import load_tokenizer
from outpace.runtime.references import accepted_parameters, load_function, named_parameters
from outpace.tasks.dataset import Dataset, JoinedRows, open_rows
from outpace.tasks.registry import TaskSources

Transform = Callable[[Any], Mapping[str, Any]]


class Options(dict[str, Any]):
    """The content of a file as transforms see it: values are attributes, and None if they are not set."""

    def __getattr__(self, name: str) -> Any:
        value = self.get(name)
        return Options(value) if isinstance(value, dict) else value


def open_tasks(config: Config) -> TaskSources:
    """Return the training tasks and the held-out tasks."""
    options = Options(config.tasks.options)
    train = _dataset("datasets", options, config)
    if options.test_datasets:
        return train, _dataset("test_datasets", options, config)
    size = options.val_set_size or 0
    return train.split(size if size < 1 else size / len(train), config.eval.seed)


def _dataset(key: str, options: Options, config: Config) -> Dataset:
    parts = [
        (
            open_rows(given["path"], split=given.get("split", "train"), setting=f"{key}.path"),
            _transform(f"{key}.type", given.get("type"), number, options, config),
        )
        for number, given in enumerate(options[key])
    ]
    return Dataset(JoinedRows(parts), key, duplicate_ids="number", setting=key)


def _transform(key: str, reference: str | None, number: int, options: Options, config: Config) -> Transform:
    """Return the row function that the user's function makes. It may come with arguments for `Dataset.map`."""
    if reference is None:
        return lambda row: row
    make = load_function(reference, key)
    made = make(options, **dict.fromkeys(accepted_parameters(make, {"dataset_idx"}), number))
    function, mapping = made if isinstance(made, tuple) else (made, {})
    if unknown := sorted(set(mapping) - {"remove_columns"}):
        raise BadInput(f"{key}: {reference} returned {', '.join(unknown)}; only remove_columns is supported")
    removed = mapping.get("remove_columns", [])
    if named_parameters(function, {"tokenizer"}):
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        function = partial(function, tokenizer=tokenizer)

    def transform(row: Mapping[str, Any]) -> Mapping[str, Any]:
        kept = {name: value for name, value in row.items() if removed != "__all__" and name not in removed}
        try:
            return kept | dict(function(row))
        except Exception as error:  # user code
            raise BadInput(f"{key}: {reference} raised {type(error).__name__}: {one_line(error)}") from error

    return transform
