"""A custom environment in TRL's convention: `python examples/own_environment.py`.

Public methods with type hints and a docstring are the tools. The same class works from the command line, with tasks
from a file: `outpace train --rollout.environment examples/own_environment.py:Guessing --tasks.path games.jsonl`.
"""

import outpace


class Guessing:
    def reset(self, secret, **columns):
        """Start an episode. Task columns are passed by name; a return value, if any, is appended to the prompt."""
        self.secret, self.left, self.found = secret, 4, False

    def guess(self, number: int) -> str:
        """Guess the number; says higher, lower or correct.

        Args:
            number: your guess.
        """
        if self.left == 0:
            raise ValueError("no guesses are left")  # the model sees this error and the episode continues
        self.left -= 1
        self.found = number == self.secret
        return "correct" if self.found else "higher" if number < self.secret else "lower"

    def get_reward(self):
        return float(self.found)


def games():
    return [
        {
            "id": f"{low}-{low + 11}/{secret}",
            "prompt": f"I think of a number from {low} to {low + 11}. Find it in 4 guesses.",
            "secret": secret,
        }
        for low in range(1, 80)
        for secret in range(low, low + 12)
    ]


if __name__ == "__main__":
    trainer = outpace.Trainer(
        model="starter-agent",
        tasks=games(),
        environment=Guessing,
        config={
            "rollout.max_turns": 4,
            "pacing.groups_per_step": 16,
            "pacing.chunk_groups": 8,
            "eval.count": 128,
            "run.steps": 20,
            "run.dir": "runs/own_environment",
            "run.overwrite": True,
        },
    )
    summary = trainer.train()
    print(f"held out: {summary.eval_first:.2f} before, {summary.eval_last:.2f} after")
