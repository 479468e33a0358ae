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
import math
import random
import time
from collections.abc import Iterable, Iterator
from itertools import islice, permutations
from pathlib import Path
from typing import NamedTuple

import torch
from starter_files import ASSISTANT, END, USER, make_portable, make_tokenizer, write_card
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outpace.rewards.countdown import solves
from outpace.tasks.countdown import (
    PLAIN_OPERATORS,
    TARGETS,
    Countdown,
    Puzzle,
    plain_expressions,
    split_of,
)

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "src" / "outpace" / "models" / "starter"
BATCH = 64
PEAK_LR = 2e-3
WARMUP = 50
VARIED_SHARE = 0.1
EVAL_PUZZLES = 1024
MAX_ANSWER = 24
EVAL_BATCH = 256
IGNORED = -100


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
                if value in TARGETS and split_of(puzzle) == "train":
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


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def make_batch(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] and labels [B, T] that cover the answer and its end, nothing else."""
    texts = [f"{USER}{prompt}{END}{ASSISTANT}{answer}{END}" for prompt, answer in pairs]
    tokens_B_T = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    labels_B_T = tokens_B_T.masked_fill(tokens_B_T == tokenizer.pad_token_id, IGNORED)
    for row, (prompt, _) in enumerate(pairs):
        labels_B_T[row, : len(prompt) + 3] = IGNORED
    return tokens_B_T, labels_B_T


def training_data(seed: int) -> Iterator[tuple[str, str]]:
    """The pairs of all phases, in order."""
    source, rng = Countdown("train"), random.Random(seed)
    given, reordered = find_solutions(sorted({source.puzzle(index).numbers for index in range(len(source))}))
    print(f"{len(given):,} puzzles to learn from", flush=True)
    for phase in (LEARN, BLUR):
        yield from islice(examples(given, reordered, phase, rng), phase.steps * BATCH)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine that ends at a twentieth of the peak."""
    return PEAK_LR * min(1.0, step / WARMUP) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Iterator[tuple[str, str]]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    steps, started = LEARN.steps + BLUR.steps, time.monotonic()
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        tokens_B_T, labels_B_T = make_batch(list(islice(data, BATCH)), tokenizer)
        logits_B_T_V = model(input_ids=tokens_B_T, use_cache=False).logits
        loss = cross_entropy(logits_B_T_V[:, :-1].flatten(0, 1), labels_B_T[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            spent = time.monotonic() - started
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {spent:.0f} s", flush=True)


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


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> LlamaForCausalLM:
    """Store in bfloat16 and return what a run will load: the rounded weights, in float32."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(out)  # type: ignore[arg-type]
    tokenizer.save_pretrained(out)
    make_portable(out)
    return LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)


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
    train(model, tokenizer, training_data(options.seed))
    stored = save(model, tokenizer, options.out)

    source = Countdown("heldout", size=EVAL_PUZZLES)
    puzzles = [source.puzzle(index) for index in range(EVAL_PUZZLES)]
    sampled = accuracy(stored, tokenizer, puzzles, greedy=False)
    greedy = accuracy(stored, tokenizer, puzzles, greedy=True)
    learn, blur = (f"{phase.steps * BATCH:,} examples, {phase.solved:.0%} of them solutions" for phase in (LEARN, BLUR))
    write_card(options.out, model.num_parameters(), learn, blur, sampled, greedy)
    print(f"held-out accuracy on {EVAL_PUZZLES}: sampled {sampled:.3f}, greedy {greedy:.3f}")
    print(f"written to {options.out} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
