"""MERGED"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outpace.errors import BadInput


def check_objects(model: Any, tokenizer: Any) -> None:
    """Raise `BadInput` for objects that cannot be saved and loaded again as a causal language model."""
    kind = type(model).__name__
    if hasattr(model, "peft_config"):
        raise BadInput(f"model: this {kind} already has adapters; pass the base model and set lora.rank")
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise BadInput(f"model: {kind} is not supported; pass a name, a path or a transformers causal LM")
    if getattr(model, "is_quantized", False):
        raise BadInput(f"model: this {kind} is quantized and cannot be trained; load it without quantization")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        got = "none" if tokenizer is None else f"a {type(tokenizer).__name__}"
        raise BadInput(f"tokenizer: a model object needs its transformers tokenizer, got {got}")


def save_objects(model: Any, tokenizer: Any, directory: Path) -> None:
    """Save an in-memory model as safetensors, with its tokenizer and chat template, for other processes to load."""
    try:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    except OSError as error:
        raise BadInput(f"model: cannot save it in {directory}: {error.strerror or error}") from None
