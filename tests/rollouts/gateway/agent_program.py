"""An agent as a user writes it: the official client, settings in environment variables, the task on standard input."""

import json
import os
import sys

from openai import OpenAI

task = json.load(sys.stdin)
model = os.environ["OPENAI_MODEL"]
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
messages = [{"role": "user", "content": task["prompt"]}]

with OpenAI() as client:
    first = client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0)
    call = first.choices[0].message.tool_calls[0]
    total = sum(json.loads(call.function.arguments).values())
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": str(total)}]
    answer = ""
    for chunk in client.chat.completions.create(model=model, messages=messages, tools=tools, stream=True):
        answer += chunk.choices[0].delta.content or ""

print("thoughts for the log:", answer, os.environ["OUTPACE_TASK_ID"])
assert "outpace" not in sys.modules
if answer != task["answer"]:
    sys.exit(f"expected {task['answer']}\nbut the model said {answer}")
