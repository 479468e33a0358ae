"""Exporting a LoRA run: merged into the model, or as a peft adapter directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outpace.checkpoint.commit import begin, commit
from outpace.checkpoint.export import export
from outpace.errors import BadInput
from outpace.learner import state
from outpace.learner.core import LearnerCore
from support import resolved, write_resolved

TOKENS = torch.arange(12)[None] % 32


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=32, tie_word_embeddings=True, initializer_range=0.3, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def make_run(tmp_path: Path, base: Path) -> Callable[..., tuple[Path, LearnerCore]]:
    """Return a run directory with one checkpoint, and the learner that wrote it."""

    def make(rank: int) -> tuple[Path, LearnerCore]:
        settings = resolved({"lora.rank": rank})
        core = LearnerCore(LlamaForCausalLM.from_pretrained(base), settings)
        with torch.no_grad():
            for parameter in core.parameters.values():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        run = tmp_path / f"run-{rank}"
        temporary = begin(run / "checkpoints", 1)
        state.save(core, temporary)
        commit(temporary)
        write_resolved(run, f'[model]\npath = "{base}"\n')
        return run, core

    return make


def logits_of(model: PreTrainedModel | peft.PeftModel) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return logits


def test_an_export_is_the_model_with_merged_adapters(
    make_run: Callable[..., tuple[Path, LearnerCore]], base: Path, tmp_path: Path
) -> None:
    run, core = make_run(4)
    out = export(run, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    expected = core.weights()
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not torch.allclose(logits_of(model), logits_of(AutoModelForCausalLM.from_pretrained(base)))
    assert sorted(os.listdir(out)) == ["config.json", "generation_config.json", "model.safetensors"]


def test_an_adapter_export_is_a_directory_that_peft_loads_on_top_of_the_model(
    make_run: Callable[..., tuple[Path, LearnerCore]], tmp_path: Path
) -> None:
    run, core = make_run(4)
    out = export(run, tmp_path / "out", adapter=True)
    assert sorted(os.listdir(out)) == ["adapter_config.json", "adapter_model.safetensors"]
    alone = peft.AutoPeftModelForCausalLM.from_pretrained(str(out))
    whole = AutoModelForCausalLM.from_pretrained(export(run, tmp_path / "whole"))
    torch.testing.assert_close(logits_of(alone), logits_of(whole))
    assert {name for name, _ in alone.named_parameters() if "lora_" in name} == {
        f"base_model.model.{name}" for name in core.parameters
    }


def test_an_adapter_export_of_a_run_without_adapters_is_rejected(
    make_run: Callable[..., tuple[Path, LearnerCore]], tmp_path: Path
) -> None:
    run, _ = make_run(0)
    with pytest.raises(BadInput, match=r"^--adapter: .*step-"):
        export(run, tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()
