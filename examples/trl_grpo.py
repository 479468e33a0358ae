"""A GRPO script for TRL with one line changed, the import of the trainer. A minute or two on two cores.

python examples/trl_grpo.py
"""

from datasets import Dataset

from outpace.compat.trl import GRPOConfig, GRPOTrainer
from outpace.tasks.countdown import PLAIN_OPERATORS, Countdown, plain_expressions


def puzzles(split, count):
    rows = []
    for task in Countdown(split, size=count):
        numbers, target = tuple(task.columns["numbers"]), task.columns["target"]
        found = [text for text, value in plain_expressions(numbers, PLAIN_OPERATORS[len(numbers)]) if value == target]
        rows.append({"prompt": [{"role": "user", "content": task.prompt}], "solutions": found})
    return Dataset.from_list(rows)


def solved(completions, solutions, **kwargs):
    contents = [completion[0]["content"].strip() for completion in completions]
    return [float(content in accepted) for content, accepted in zip(contents, solutions, strict=True)]


if __name__ == "__main__":
    training_args = GRPOConfig(
        output_dir="runs/trl-grpo",
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        num_generations=8,
        num_generations_eval=1,
        max_completion_length=32,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=8,
        gradient_checkpointing=False,
        max_steps=24,
    )
    trainer = GRPOTrainer(
        model="starter",
        reward_funcs=solved,
        args=training_args,
        train_dataset=puzzles("train", 4096),
        eval_dataset=puzzles("heldout", 512),
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    print(f"held-out reward {before['eval_reward']:.3f} -> {after['eval_reward']:.3f}")
