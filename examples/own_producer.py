"""A custom data producer: `python examples/own_producer.py`. Takes about a minute on two cores.

For each round, the current policy answers every candidate task a few times. The round keeps the tasks that it solves
sometimes but not always, because only these give a training signal.
The output of `produce` is in `logs/producer.log` of the run directory.
"""

import random

import outpace
from outpace.rewards.builtin import countdown
from outpace.tasks.countdown import Countdown


class Frontier(outpace.BaseDataProducer):
    """Countdown tasks that the policy solves in some of its attempts."""

    def __init__(self, config=None, tasks=16, attempts=4):
        super().__init__(config)
        self.tasks, self.attempts = tasks, attempts
        self.source = Countdown("train", 0)

    def produce(self, model, global_step, *, round, **kwargs):
        rng = random.Random(round)
        candidates = [self.source[rng.randrange(len(self.source))] for _ in range(2 * self.tasks)]
        answers = iter(model.generate([task.prompt for task in candidates], n=self.attempts))
        solved = [self.share_solved(task, [next(answers).text for _ in range(self.attempts)]) for task in candidates]
        order = sorted(range(len(candidates)), key=lambda index: abs(solved[index] - 0.5))
        chosen = [candidates[index] for index in order[: self.tasks]]
        between = sum(0 < share < 1 for share in solved)
        print(f"round {round}, version {model.version}: {between} of {len(candidates)} candidates at the frontier")
        return chosen

    def share_solved(self, task, texts):
        columns = {name: [value] * len(texts) for name, value in task.columns.items()}
        scores = countdown(prompts=[task.prompt] * len(texts), completions=texts, **columns)
        return sum(score >= 1 for score in scores) / len(texts)


if __name__ == "__main__":
    trainer = outpace.Trainer(
        model="starter",
        producer=Frontier(outpace.ProducerConfig(async_prefetch=True, sync_warmup_rollouts=1)),
        rewards="countdown",
        config={
            "pacing.groups_per_step": 8,
            "pacing.chunk_groups": 4,
            "run.steps": 10,
            "run.dir": "runs/own_producer",
            "run.overwrite": True,
        },
    )
    trainer.train()
