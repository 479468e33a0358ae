"""An ordinary agent: the official OpenAI client and a loop of tool calls, without any outpace code.

    outpace train --model.path starter-agent --tasks.name calculator --rewards.functions number \\
      --rollout.agent python,examples/openai_agent.py --rollout.group_size 4 --pacing.groups_per_step 2

outpace starts it once per episode with the task as JSON on stdin and the policy behind OPENAI_BASE_URL. Every other
request is streamed, to show that both work.
"""

import ast
import json
import operator
import os
import sys

from openai import OpenAI

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Work out an expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def complete(client, messages, stream):
    """Request one completion and return it as a message, assembled from deltas if streamed."""
    options = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": TOOLS, "temperature": 0.0}
    if not stream:
        return client.chat.completions.create(**options).choices[0].message.model_dump(exclude_none=True)
    content, calls = "", {}
    for chunk in client.chat.completions.create(**options, stream=True):
        for delta in [choice.delta for choice in chunk.choices]:
            content += delta.content or ""
            for call in delta.tool_calls or []:
                merged = calls.setdefault(
                    call.index, {"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}}
                )
                merged["function"]["name"] += call.function.name or ""
                merged["function"]["arguments"] += call.function.arguments or ""
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls.values())} if calls else {})}


def run_tool(call):
    """Run the tool. The expression is model output: parse it, never execute it."""
    try:
        return str(value(ast.parse(json.loads(call["function"]["arguments"])["expression"], mode="eval").body))
    except (ValueError, KeyError, TypeError, SyntaxError) as error:
        return f"error: {error}"


def value(node):
    """Evaluate a parsed arithmetic expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    raise ValueError("only whole numbers, + - * and parentheses")


def main():
    task = json.load(sys.stdin)
    messages = [{"role": "user", "content": task["prompt"]}]
    turns = 0
    with OpenAI() as client:
        for turns in range(1, 4):
            message = complete(client, messages, stream=turns % 2 == 0)
            messages.append(message)
            if not message.get("tool_calls"):
                break
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": run_tool(call)}
                for call in message["tool_calls"]
            ]
    if "AGENT_LOG" in os.environ:
        with open(os.environ["AGENT_LOG"], "a") as log:
            log.write(json.dumps({"turns": turns, "modules": sorted(sys.modules)}) + "\n")


if __name__ == "__main__":
    main()
