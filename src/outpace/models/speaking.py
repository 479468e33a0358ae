"""Which dialect a model speaks."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from outpace.errors import BadInput
from outpace.models.dialect import Dialect, TemplateDialect

TEMPLATE = "template"
"""The name of the dialect that goes by the model's own chat template."""


def dialect_of(tokenizer: Any, stop_ids: Sequence[int], wanted: str | None = None) -> Dialect:
    """The dialect that `model.renderer` names; without one, the family that the model's name is known to belong to."""
    if wanted == TEMPLATE:
        return TemplateDialect(tokenizer, stop_ids)
    if importlib.util.find_spec("renderers") is None:
        if wanted is not None:
            raise BadInput(f'model.renderer: {wanted} needs the package renderers: pip install "outpace[renderers]"')
        return TemplateDialect(tokenizer, stop_ids)
    if wanted is None and not _may_be_a_hub_name(tokenizer):
        return TemplateDialect(tokenizer, stop_ids)
    from outpace.models.renderer import renderer_dialect  # which loads the package

    return renderer_dialect(tokenizer, stop_ids, wanted) or TemplateDialect(tokenizer, stop_ids)


def _may_be_a_hub_name(tokenizer: Any) -> bool:
    """Families are known by the exact names of their models; the package takes a second to load."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(getattr(tokenizer, "name_or_path", ""))))
