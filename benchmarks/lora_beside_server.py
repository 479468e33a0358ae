"""LoRA on a model of 7B parameters with a vLLM server beside it, on one GPU: memory and tokens per second.

    python benchmarks/lora_beside_server.py [--shape 7B] [--steps 6] [--json FILE] [settings of outpace]

Weights are random, in bfloat16, with the tokenizer of SmolLM2-135M. Answers are random tokens up to the length limit,
so the reward is whether the text has an even number of characters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 32},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3},
}  # fmt: skip

SETTINGS = {
    "model.dtype": "bfloat16",
    "run.device": "cuda",
    "tasks.name": str(Path(__file__).with_name("stories.py").resolve()) + ":stories",
    "rewards.functions": "outpace.commands.end_to_end.lengths:even_characters",
    "lora.rank": "16",
    "engine.kind": "vllm",
    "engine.context": "1024",
    "engine.slots": "256",
    "rollout.max_tokens": "512",
    "pacing.groups_per_step": "16",
    "learner.gradient_checkpointing": "true",
    "eval.every": "0",
    "checkpoint.every": "0",
}
FIGURES = {
    "step_s": "time/step_s",
    "trained_tokens": "throughput/trained_tokens",
    "pause_s": "sync/pause_s",
    "learner_waits_s": "idle/learner_s",
    "engine_waits_s": "idle/engine_s",
    "reward": "reward/mean",
    "mean_length": "completions/mean_length",
    "engine_kl": "offpolicy/kl_engine",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--shape", default="7B", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory) / "model", SHAPES[options.shape])
        result = train(Path(directory), options.steps, words)
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def write_model(directory: Path, shape: dict[str, int]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from outpace.models.loading import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m")
    tokenizer.save_pretrained(directory)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    config = LlamaConfig(**shape, **ends, vocab_size=len(tokenizer), max_position_embeddings=2048)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    print(f"{sum(each.numel() for each in model.parameters()) / 1e9:.2f}B parameters", flush=True)
    model.cpu().save_pretrained(directory)  # type: ignore[no-untyped-call]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def train(directory: Path, steps: int, words: list[str]) -> dict[str, Any]:
    given = {**SETTINGS, "model.path": directory / "model", "run.dir": directory / "run", "run.steps": steps}
    command = [sys.executable, "-m", "outpace.cli", "train", *(f"--{key}={value}" for key, value in given.items())]
    memory = GpuMemory()
    memory.start()
    done = subprocess.run([*command, *words], check=False)
    memory.stop()
    if done.returncode:
        for log in sorted((directory / "run" / "logs").glob("*")):
            print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-30:], sep="\n")
        raise SystemExit(done.returncode)
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    found = {name: [line.get(metric) for line in lines] for name, metric in FIGURES.items()}
    later = found["step_s"][1:]
    return {
        **found,
        "seconds per step, without the first": statistics.fmean(later),
        "trained tok/s": sum(found["trained_tokens"][1:]) / sum(later),
        "gpu_memory_gb": {"largest": memory.largest_gb, "of the learner": memory.learner_gb},
        "metrics": lines[-1],
    }


class GpuMemory(threading.Thread):
    """The largest memory in use on the GPU so far, and of the process with the most that is not a server's."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest_gb = 0.0
        self.learner_gb = 0.0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.5):
            used = _smi("--query-gpu=memory.used")
            self.largest_gb = max([self.largest_gb, *(float(each[0]) * 2**20 / 1e9 for each in used)])
            for name, memory in _smi("--query-compute-apps=process_name,used_memory"):
                if "vllm" not in name.lower() and memory.isdigit():
                    self.learner_gb = max(self.learner_gb, float(memory) * 2**20 / 1e9)

    def stop(self) -> None:
        self._done.set()
        self.join()


def _smi(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [[part.strip() for part in line.split(",")] for line in output.splitlines() if line.strip()]


if __name__ == "__main__":
    main()
