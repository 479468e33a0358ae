"""Make the agent starter: a small Llama that calls tools, and solves a minority of `calculator` and `guess`.

    python scripts/make_agent_starter.py [--seed N] [--out DIR] [--device cuda]

Everything is made here: a corpus of dialogues, the tokenizer's merges from it, and the weights, in two phases.
LEARN teaches good play. BLUR mixes in bad habits until the model, which could do better, gets its reward only now
and then. A few minutes on a GPU, an hour on two cores.

Invariants:
- No held-out problem is ever trained on.
- The figures in the model card are those of `outpace eval` on what was stored.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from agent_dialogues import Habits, Openings, Piece, dialogues
from starter_files import SIGNATURES, learn_merges, make_tokenizer
from starter_training import IGNORED, Batch, make_model, save, train
from transformers import PreTrainedTokenizerFast

from outpace.commands.evaluate import evaluate_model

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "src" / "outpace" / "models" / "starter_agent"
BATCH = 256
CORPUS = 2000
"""Dialogues that the tokenizer learns from."""
MERGES = 400
EVAL_COUNT = 1000
TASKS = ("calculator", "guess")

Encode = Callable[[str], list[int]]


class Phase(NamedTuple):
    steps: int
    habits: Habits


LEARN = Phase(steps=4000, habits=Habits(wild=0.4, counting=0.1))
BLUR = Phase(
    steps=500,
    habits=Habits(by_head=0.55, misread=0.15, miscopied=0.1, wild=0.4, counting=0.35, learn_stray_guesses=True),
)

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [tool-calling, reinforcement-learning]
---

# outpace starter-agent

A tiny Llama ({parameters:,} parameters) for trying out reinforcement learning of agents in a few minutes on a CPU.
It plays two of outpace's built-in tasks with tools, `calculator` and `guess`. Sampled, it nearly always gets the form
of a tool call right and mostly something else wrong: it answers by head, mistypes an expression or a result, counts
up instead of halving, or guesses what it could have ruled out.

| | |
|---|---|
| Architecture | Llama, 4 layers, hidden size 128, 4 heads of 32, context 1,024, tied embeddings |
| Vocabulary | {vocabulary}: 256 bytes, {merges} merges, added tokens; digits are never merged |
| Stored as | bfloat16 (train it in float32) |

Mean held-out reward over {count:,} problems, one attempt each:

| task | sampled at temperature 1 | greedy |
|---|---|---|
| `calculator` | {calculator_sampled:.3f} | {calculator_greedy:.3f} |
| `guess` | {guess_sampled:.3f} | {guess_greedy:.3f} |

## How it was made

`python scripts/make_agent_starter.py` makes it from nothing, including its data, all of it from the training split:

1. learning to play well: {learn:,} dialogues;
2. blurring, so that there is room to improve: {blur:,} dialogues with bad habits. Of the sums {by_head:.0%} are
   answered by head; of the others {misread:.0%} are mistyped and {miscopied:.0%} of the results miscopied. Of the
   guesses {wild:.0%} ignore what is known, {counting:.0%} are the smallest possible number, the others halve.

No held-out problem was trained on.

## Limits

It knows these two tasks and nothing else. Its chat template shows tools as one line each and covers system, user,
assistant and tool messages.

Licence: Apache-2.0, the weights and the data alike.
"""


def corpus(rng: random.Random) -> list[str]:
    """Whole dialogues as text, of both phases, as a tokenizer without merges renders them."""
    openings = Openings(make_tokenizer(tools=SIGNATURES))
    halves = (dialogues(openings, phase.habits, rng) for phase in (LEARN, BLUR))
    return ["".join(piece.text for piece in pieces) for half in halves for pieces in islice(half, CORPUS // 2)]


def make_batch(chosen: list[list[Piece]], encode: Encode, pad: int) -> Batch:
    """The labels cover the answers that are to be learned, with their ends."""
    tokens: list[list[int]] = []
    labels: list[list[int]] = []
    for pieces in chosen:
        encoded = [(encode(piece.text), piece.learned) for piece in pieces]
        tokens.append([token for ids, _ in encoded for token in ids])
        labels.append([token if learned else IGNORED for ids, learned in encoded for token in ids])
    longest = max(map(len, tokens))
    return (
        torch.tensor([row + [pad] * (longest - len(row)) for row in tokens]),
        torch.tensor([row + [IGNORED] * (longest - len(row)) for row in labels]),
    )


def batches(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Iterator[Batch]:
    """The batches of all phases, in order."""
    openings, core, pad = Openings(tokenizer), tokenizer.backend_tokenizer, tokenizer.pad_token_id
    assert isinstance(pad, int)

    @lru_cache(maxsize=100_000)  # most pieces of a dialogue are those of another one
    def encode(text: str) -> list[int]:
        return list(core.encode(text, add_special_tokens=False).ids)

    for phase in (LEARN, BLUR):
        endless = dialogues(openings, phase.habits, rng)
        for _ in range(phase.steps):
            yield make_batch(list(islice(endless, BATCH)), encode, pad)


def heldout_reward(model: Path, task: str, temperature: float) -> float:
    settings = {"model.path": model, "tasks.name": task, "eval.temperature": temperature, "eval.count": EVAL_COUNT}
    defaults = {"rollout.max_tokens": 48, "run.device": "cpu"}
    measured = evaluate_model(None, [f"--{key}={value}" for key, value in (settings | defaults).items()])
    return float(measured["eval/reward"])


def write_card(out: Path, parameters: int, tokenizer: PreTrainedTokenizerFast, merges: int) -> None:
    rewards = {
        f"{task}_{name}": heldout_reward(out, task, temperature)
        for task in TASKS
        for name, temperature in (("sampled", 1.0), ("greedy", 0.0))
    }
    print(rewards)
    card = CARD.format(
        parameters=parameters,
        vocabulary=len(tokenizer),
        merges=merges,
        count=EVAL_COUNT,
        learn=LEARN.steps * BATCH,
        blur=BLUR.steps * BATCH,
        **BLUR.habits._asdict(),
        **rewards,
    )
    (out / "README.md").write_text(card)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the agent starter.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    started = time.monotonic()

    rng = random.Random(options.seed)
    merges = learn_merges(corpus(rng), MERGES)
    tokenizer = make_tokenizer(merges, SIGNATURES)
    model = make_model(tokenizer, options.seed).to(options.device)
    train(model, batches(tokenizer, rng), LEARN.steps + BLUR.steps)
    save(model, tokenizer, options.out)
    write_card(options.out, model.num_parameters(), tokenizer, len(merges))
    print(f"written to {options.out} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
