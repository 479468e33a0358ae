"""An agent as somebody may have written it years ago: the official client, a loop of tool calls, nothing of outpace.

Reads its task from standard input; streams every other answer. What it saw goes to the file of AGENT_LOG.
"""

import json
import os
import sys

from openai import OpenAI

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


def ask(client, messages, stream):
    """One answer as a message, whole or put together from its deltas."""
    options = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": TOOLS, "temperature": 0.0}
    if not stream:
        return client.chat.completions.create(**options).choices[0].message.model_dump(exclude_none=True)
    content, calls = "", {}
    for chunk in client.chat.completions.create(**options, stream=True):
        for delta in [choice.delta for choice in chunk.choices]:
            content += delta.content or ""
            for call in delta.tool_calls or []:
                kept = calls.setdefault(
                    call.index, {"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}}
                )
                kept["function"]["name"] += call.function.name or ""
                kept["function"]["arguments"] += call.function.arguments or ""
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls.values())} if calls else {})}


def result_of(call):
    """What the tool says: sums of whole numbers, which is all that this test needs."""
    try:
        expression = json.loads(call["function"]["arguments"])["expression"]
        return str(sum(int(term) for term in str(expression).replace("-", "+-").split("+") if term))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "error: no sum"


def main():
    task = json.load(sys.stdin)
    messages = [{"role": "user", "content": task["prompt"]}]
    turns = 0
    with OpenAI() as client:
        for turns in range(1, 4):
            message = ask(client, messages, stream=turns % 2 == 0)
            messages.append(message)
            if not message.get("tool_calls"):
                break
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result_of(call)}
                for call in message["tool_calls"]
            ]
    with open(os.environ["AGENT_LOG"], "a") as log:
        log.write(json.dumps({"turns": turns, "outpace": [name for name in sys.modules if "outpace" in name]}) + "\n")


main()
