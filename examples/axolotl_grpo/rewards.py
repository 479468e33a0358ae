"""Dataset transform and reward functions of config.yaml, in the form that Axolotl's documentation describes."""

import ast
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value_and_numbers(node):
    """Return the value of an expression and the numbers in it. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value, [node.value]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, used = value_and_numbers(node.left)
        right, more = value_and_numbers(node.right)
        return OPERATORS[type(node.op)](left, right), used + more
    raise ValueError("not an expression of numbers")


def accuracy_reward(completions, numbers, target, **kwargs) -> list[float]:
    """1 for an expression that uses each number once and has the right value."""
    rewards = []
    for completion, given, goal in zip(completions, numbers, target, strict=True):
        try:
            value, used = value_and_numbers(ast.parse(completion[0]["content"].strip(), mode="eval").body)
            rewards.append(float(value == goal and sorted(used) == sorted(given)))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            rewards.append(0.0)
    return rewards


def prompt_transform(cfg, *args, **kwargs):
    """Convert rows into chat prompts."""

    def transform_fn(example, tokenizer=None):
        return {"prompt": [{"role": "user", "content": example["question"]}]}

    return transform_fn, {"remove_columns": ["question"]}
