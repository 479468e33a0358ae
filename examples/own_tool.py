"""A custom tool: `python examples/own_tool.py`. Takes about a minute on two cores.

`starter-agent` is a tiny model trained on two kinds of tasks: "What is 347*28+15?" with a tool `calculate` described
exactly as below, and the guessing game of `examples/own_environment.py`. A real model works with any tool.
"""

import ast
import operator
import random

import outpace

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> str:
    """Work out an expression.

    Args:
        expression: numbers joined by + - * and parentheses, such as 12*(3+4).
    """
    if len(expression) > 100:
        raise ValueError("that is too long")
    return str(value(ast.parse(expression, mode="eval").body))


def value(node: ast.expr) -> int:
    """Evaluate a parsed expression. It is model output: parse it, never execute it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    raise ValueError("only whole numbers, + - * and parentheses")


def problems(count: int) -> list[dict[str, object]]:
    rng = random.Random(0)
    numbers = [(rng.randint(100, 999), rng.randint(11, 99), rng.randint(11, 99)) for _ in range(count)]
    return [{"id": f"{a}*{b}+{c}", "prompt": f"What is {a}*{b}+{c}?", "answer": a * b + c} for a, b, c in set(numbers)]


if __name__ == "__main__":
    trainer = outpace.Trainer(
        model="starter-agent",
        tasks=problems(2000),
        tools=calculate,
        rewards="number",  # compares the last number of the final message with the column `answer`
        config={
            "rollout.max_turns": 3,
            "pacing.groups_per_step": 8,
            "pacing.chunk_groups": 4,
            "learner.lr": 3e-5,
            "filter.uniform": False,
            "eval.count": 64,
            "run.steps": 15,
            "run.dir": "runs/own_tool",
            "run.overwrite": True,
        },
    )
    summary = trainer.train()
    print(f"held out: {summary.eval_first:.2f} before, {summary.eval_last:.2f} after")
