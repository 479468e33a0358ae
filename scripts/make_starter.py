"""Make the starter model: a byte-level Llama that solves a minority of countdown puzzles.

    python scripts/make_starter.py [--seed N] [--out DIR]

The supervised data is made here, from puzzles of the training split, in two phases. LEARN teaches solutions.
BLUR mixes in random expressions over the same numbers until the model, which could do better, gives a right
answer only now and then: reinforcement learning has something to find and room to grow.

Invariants:
- No held-out puzzle is ever trained on.
- The same seed, thread count and torch build give the same weights.
"""

import argparse
import random
import time
from collections.abc import Iterable, Iterator
from itertools import islice, permutations
from pathlib import Path
from typing import NamedTuple

import torch
from starter_files import ASSISTANT, END, USER, make_tokenizer
from starter_training import IGNORED, Batch, make_model, save, train
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outpace.rewards.builtin import solves
from outpace.tasks.countdown import PLAIN_OPERATORS, TARGETS, Countdown, Puzzle, plain_expressions, puzzle_split

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "src" / "outpace" / "models" / "starter"
BATCH = 64
VARIED_SHARE = 0.1
EVAL_PUZZLES = 1024
MAX_ANSWER = 24
EVAL_BATCH = 256


CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [countdown, reinforcement-learning, byte-level]
---

# outpace starter

A tiny Llama ({parameters:,} parameters) for trying out reinforcement learning in a minute or two on a CPU.
It answers countdown puzzles: for the message `9 5 3 2=9` it writes an expression like `9+5-3-2`, which should
use each number once and equal the target. Sampled, it nearly always gets the form right and mostly the value
wrong.

| | |
|---|---|
| Architecture | Llama, 4 layers, hidden size 128, 4 heads of 32, context 1,024, tied embeddings |
| Vocabulary | 256 bytes and 16 added tokens, no merges |
| Stored as | bfloat16 (train it in float32) |
| Held-out accuracy, sampled at temperature 1 | {sampled:.3f} |
| Held-out accuracy, greedy | {greedy:.3f} |

Accuracies are over 1,024 held-out puzzles, one answer each.

## How it was made

`python scripts/make_starter.py` makes it from nothing, including its data, all of it from the training split:

1. learning to solve: {learn};
2. blurring, so that there is room to improve: {blur}, the others random expressions over the same numbers.

No held-out puzzle was trained on.

## Limits

It knows countdown and nothing else. The chat template covers system, user, assistant and tool messages, so
that it can stand in for a larger model in tests, but it has never seen a tool call.

Licence: Apache-2.0, the weights and the data alike.
"""


class Phase(NamedTuple):
    steps: int
    solved: float
    """The share of answers that are solutions; the others are random expressions."""
    reordered: float
    """The share of solutions that take the numbers in another order than given."""


LEARN = Phase(steps=1700, solved=1.0, reordered=0.0)
BLUR = Phase(steps=300, solved=0.6, reordered=0.1)

Tree = int | tuple[str, "Tree", "Tree"]
Solutions = dict[Puzzle, list[str]]


def random_tree(numbers: list[int], rng: random.Random) -> Tree:
    """A random shape with random operators over the numbers in the order given."""
    if len(numbers) == 1:
        return numbers[0]
    cut = rng.randrange(1, len(numbers))
    return rng.choice("+-*/"), random_tree(numbers[:cut], rng), random_tree(numbers[cut:], rng)


def render(tree: Tree, beside: str = "", is_right: bool = False) -> str:
    """The text of a tree, with just the parentheses its meaning needs."""
    if isinstance(tree, int):
        return str(tree)
    operator, left, right = tree
    text = f"{render(left, operator)}{operator}{render(right, operator, is_right=True)}"
    looser = operator in "+-" and beside in ("*", "/")
    ambiguous = is_right and beside in ("-", "/") and (operator in "*/") == (beside == "/")
    return f"({text})" if looser or ambiguous else text


def find_solutions(numbers_of: Iterable[tuple[int, ...]]) -> tuple[Solutions, Solutions]:
    """The plain solutions of training puzzles: with the numbers as given, and in any other order."""
    given: Solutions = {}
    reordered: Solutions = {}
    for numbers in numbers_of:
        for order in sorted(set(permutations(numbers))):
            for text, value in plain_expressions(order, PLAIN_OPERATORS[len(numbers)]):
                puzzle = Puzzle(numbers, value)
                if value in TARGETS and puzzle_split(puzzle) == "train":
                    (given if order == numbers else reordered).setdefault(puzzle, []).append(text)
    return given, reordered


def random_answer(puzzle: Puzzle, rng: random.Random) -> str:
    """A well-formed expression over the puzzle's numbers that solves it only by luck."""
    if rng.random() < VARIED_SHARE:
        return render(random_tree(rng.sample(puzzle.numbers, len(puzzle.numbers)), rng))
    return "".join(f"{number}{rng.choice('+-*/')}" for number in puzzle.numbers)[:-1]


def examples(given: Solutions, reordered: Solutions, phase: Phase, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Endless (prompt, answer) pairs, right or random in the proportion of the phase."""
    puzzles = list(given)
    while True:
        puzzle = rng.choice(puzzles)
        if rng.random() >= phase.solved:
            yield puzzle.text(), random_answer(puzzle, rng)
        elif puzzle in reordered and rng.random() < phase.reordered:
            yield puzzle.text(), rng.choice(reordered[puzzle])
        else:
            yield puzzle.text(), rng.choice(given[puzzle])


def make_batch(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> Batch:
    """The labels cover the answer and its end, nothing else."""
    texts = [f"{USER}{prompt}{END}{ASSISTANT}{answer}{END}" for prompt, answer in pairs]
    tokens_B_T = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    labels_B_T = tokens_B_T.masked_fill(tokens_B_T == tokenizer.pad_token_id, IGNORED)
    for row, (prompt, _) in enumerate(pairs):
        labels_B_T[row, : len(prompt) + 3] = IGNORED
    return tokens_B_T, labels_B_T


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Batch]:
    """The batches of all phases, in order."""
    source, rng = Countdown("train"), random.Random(seed)
    given, reordered = find_solutions(sorted({source.puzzle(index).numbers for index in range(len(source))}))
    print(f"{len(given):,} puzzles to learn from", flush=True)
    for phase in (LEARN, BLUR):
        pairs = examples(given, reordered, phase, rng)
        for _ in range(phase.steps):
            yield make_batch(list(islice(pairs, BATCH)), tokenizer)


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, puzzles: list[Puzzle], greedy: bool) -> float:
    """The share of puzzles solved by one answer each: at temperature 1, or the likeliest if `greedy`."""
    torch.manual_seed(0)
    solved = 0
    for start in range(0, len(puzzles), EVAL_BATCH):
        chunk = puzzles[start : start + EVAL_BATCH]
        prompts = [f"{USER}{puzzle.text()}{END}{ASSISTANT}" for puzzle in chunk]
        inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
        tokens = model.generate(**inputs, max_new_tokens=MAX_ANSWER, **sampling)  # type: ignore[misc]
        answers = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        solved += sum(solves(answer, p.numbers, p.target) for answer, p in zip(answers, chunk, strict=True))
    return solved / len(puzzles)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the starter model.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="part of what fixes the weights, to the last bit")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.monotonic()

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, options.seed)
    train(model, batches(tokenizer, options.seed), LEARN.steps + BLUR.steps)
    stored = save(model, tokenizer, options.out)

    source = Countdown("heldout", size=EVAL_PUZZLES)
    puzzles = [source.puzzle(index) for index in range(EVAL_PUZZLES)]
    sampled = accuracy(stored, tokenizer, puzzles, greedy=False)
    greedy = accuracy(stored, tokenizer, puzzles, greedy=True)
    learn, blur = (f"{phase.steps * BATCH:,} examples, {phase.solved:.0%} of them solutions" for phase in (LEARN, BLUR))
    card = CARD.format(parameters=model.num_parameters(), learn=learn, blur=blur, sampled=sampled, greedy=greedy)
    (options.out / "README.md").write_text(card)
    print(f"held-out accuracy on {EVAL_PUZZLES}: sampled {sampled:.3f}, greedy {greedy:.3f}")
    print(f"written to {options.out} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
