"""MERGED"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from outpace.errors import BadInput
from outpace.models.dialect import Dialect, TemplateDialect

TEMPLATE = "template"
"""Value of `model.renderer` for the model's own chat template."""


def dialect_of(tokenizer: Any, stop_ids: Sequence[int], wanted: str | None = None) -> Dialect:
    """Return the chat format that `model.renderer` names; by default that of the model's family, or its template."""
    if wanted == TEMPLATE:
        return TemplateDialect(tokenizer, stop_ids)
    if importlib.util.find_spec("renderers") is None:
        if wanted is not None:
            raise BadInput(f'model.renderer: {wanted} needs the package renderers: pip install "outpace[renderers]"')
        return TemplateDialect(tokenizer, stop_ids)
    if wanted is None and not _may_be_a_hub_name(tokenizer):
        return TemplateDialect(tokenizer, stop_ids)
    from outpace.models.renderer import renderer_dialect

    return renderer_dialect(tokenizer, stop_ids, wanted) or TemplateDialect(tokenizer, stop_ids)


def _may_be_a_hub_name(tokenizer: Any) -> bool:
    """Whether a family could match: families list exact hub names. Avoids loading `renderers`, which takes a second."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(getattr(tokenizer, "name_or_path", ""))))
