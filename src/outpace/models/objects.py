"""Models and tokenizers that a Python caller has in memory, written where every process can load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outpace.errors import BadInput


def check_objects(model: Any, tokenizer: Any) -> None:
    """Raise `BadInput` for what cannot be saved and loaded again as a causal language model."""
    kind = type(model).__name__
    if hasattr(model, "peft_config"):
        raise BadInput(f"model: a {kind} has adapters of its own; give the base model, and set lora.rank")
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise BadInput(f"model: {kind} is not supported; give a name, a path or a causal LM of transformers")
    if getattr(model, "is_quantized", False):
        raise BadInput(f"model: this {kind} is quantised, and its weights cannot be trained; load it without")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        given = "none" if tokenizer is None else f"a {type(tokenizer).__name__}"
        raise BadInput(f"tokenizer: a model object needs its transformers tokenizer beside it, not {given}")


def save_objects(model: Any, tokenizer: Any, directory: Path) -> None:
    """As safetensors, with the tokenizer and its chat template."""
    try:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    except OSError as error:
        raise BadInput(f"model: cannot be saved in {directory}: {error.strerror or error}") from None
