"""`python -m outpace.commands.end_to_end.accuracy JOB RESULT`: held-out accuracy of saved weights.

Both systems save weights while they train, and this process evaluates the weights of both after all trainings: the same
held-out tasks, one answer each at the training temperature, by the same engine. Evaluation does not count as training
time.

JOB is JSON: `model`, `dtype`, `device`, `prompts` (chat messages), `columns` (for the reward, by task), `reward`,
`max_tokens`, `temperature`, `seed` and `files` (safetensors). RESULT is a list of mean rewards: of the model itself,
then of each file.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from outpace.engines.embedded.engine import EmbeddedEngine
from outpace.models.chat_format import chat_format_for
from outpace.models.loading import eos_ids, load_model, load_tokenizer
from outpace.runtime.references import load_function
from outpace.runtime.rng import request_seed
from outpace.types import Ints, Sampling

SLOTS = 256


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    Path(result_file).write_text(json.dumps(asyncio.run(accuracies(job))))


async def accuracies(job: dict[str, Any]) -> list[float]:
    tokenizer = load_tokenizer(job["model"])
    stop_ids = eos_ids(job["model"])
    chat_format = chat_format_for(tokenizer, stop_ids)
    prompts = [np.array(chat_format.open(messages), dtype=np.int32) for messages in job["prompts"]]
    return [
        await _accuracy(job, file, prompts, list(chat_format.stop_ids), tokenizer) for file in (None, *job["files"])
    ]


async def _accuracy(
    job: dict[str, Any], file: str | None, prompts: Sequence[Ints], stop_ids: list[int], tokenizer: Any
) -> float:
    model = load_model(job["model"], dtype=job["dtype"], device=job["device"])
    if file is not None:
        loaded = model.load_state_dict(load_file(file), strict=False)  # tied weights are in the file once
        assert not loaded.unexpected_keys, f"{file} has other tensors than the model"
    engine = EmbeddedEngine(model, slots=min(SLOTS, len(prompts)))
    try:
        answers = await asyncio.gather(
            *(
                engine.generate(str(index), prompt, _sampling(job, index, stop_ids), 0, None)
                for index, prompt in enumerate(prompts)
            )
        )
    finally:
        await engine.close()
    texts = [tokenizer.decode(answer.tokens.tolist(), skip_special_tokens=True) for answer in answers]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    reward = load_function(job["reward"], "rewards.functions")
    return statistics.fmean(reward(prompts=job["prompts"], completions=completions, **job["columns"]))


def _sampling(job: dict[str, Any], index: int, stop_ids: list[int]) -> Sampling:
    seed = request_seed(job["seed"], index, 0, 0)
    return Sampling(max_tokens=job["max_tokens"], seed=seed, temperature=job["temperature"], stop_ids=stop_ids)


if __name__ == "__main__":
    main(*sys.argv[1:])
