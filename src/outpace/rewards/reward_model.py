"""Reward models: transformers sequence classifiers with one output, used as reward functions.

The grader process loads the model on first use and keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.errors import BadInput
from outpace.models.chat import as_messages
from outpace.rewards.functions import with_all_arguments

if TYPE_CHECKING:
    from typing import Self


class RewardModel:
    """Scores each prompt and completion with the first output of a classifier."""

    def __init__(self, path: str, tokenizer: str | None = None) -> None:
        """`path`: a Hugging Face directory or hub name. `tokenizer`: the same for the tokenizer; default: `path`."""
        self.path, self.tokenizer_path = path, tokenizer or path
        self.__name__ = path.rstrip("/").rpartition("/")[2]

    @classmethod
    def of(cls, model: Any, tokenizer: Any, directory: Path) -> Self:
        """Create a reward from a model and a tokenizer, each a name or an object. Objects are saved in `directory`."""
        for each, name in ((model, "model"), (tokenizer, "tokenizer")):
            if each is not None and not isinstance(each, str):
                each.save_pretrained(directory / name)
        path = model if isinstance(model, str) else str((directory / "model").absolute())
        own = None if isinstance(model, str) else model.config._name_or_path
        reward = cls(path, str((directory / "tokenizer").absolute()) if tokenizer is not None else own)
        reward.__name__ = (own or path).rstrip("/").rpartition("/")[2]
        return reward

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        import torch

        tokenizer, model = self._loaded
        texts = [self._text(*each) for each in zip(prompts, completions, strict=True)]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        with torch.inference_mode():
            scores: list[float] = model(**inputs.to(model.device)).logits[:, 0].float().tolist()
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        return str(self._loaded[0].apply_chat_template([*as_messages(prompt), *completion], tokenize=False))

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_path)
        model = AutoModelForSequenceClassification.from_pretrained(self.path, num_labels=1).eval()
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # the last token before padding is scored
        return tokenizer, model.to("cuda" if torch.cuda.is_available() else "cpu")


def trl_rewards(functions: Any, tokenizers: Any, directory: Path) -> list[Any]:
    """Convert the reward functions of a TRL trainer: a function, a model, a model name, or a list of these, with
    tokenizers for the models. Model objects are saved in `directory`."""
    given = functions if isinstance(functions, list) else [] if functions is None else [functions]
    tokenizers = tokenizers if isinstance(tokenizers, list) else [tokenizers] * len(given)
    if len(tokenizers) != len(given):
        raise BadInput(f"reward_processing_classes: expected one per reward function, {len(given)}")
    return [
        RewardModel.of(each, tokenizer, directory / str(number))
        if isinstance(each, str) or hasattr(each, "save_pretrained")
        else with_all_arguments(each)
        for number, (each, tokenizer) in enumerate(zip(given, tokenizers, strict=True))
    ]
