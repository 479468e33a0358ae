"""The parts of the starter model that are not weights: tokenizer, chat template, model card.

Invariants:
- Token ids 0-255 are the bytes in order; there are no merges, so any UTF-8 text round-trips.
- Every id of the vocabulary has a token: nothing the model can sample is undecodable.
- Rendering is append-only: a conversation's text is a prefix of the text of its continuation.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
SYSTEM, USER, ASSISTANT, TOOL = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
TOOL_TAGS = ("<tool_call>", "</tool_call>")
VOCABULARY_MULTIPLE = 16

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|system|>' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content + '\\n' }}
    {%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\nTo call one: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|' + message.role + '|>' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '<tool_call>{"name": ' + (function.name | tojson) + ', "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""

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


def make_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = _byte_characters()
    core = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    control = [PAD, BOS, END, SYSTEM, USER, ASSISTANT, TOOL]
    core.add_special_tokens([_added(token, special=True) for token in control])
    # Tool tags stay in decoded text when special tokens are skipped: a parser has to find them there.
    core.add_tokens([_added(token, special=False) for token in TOOL_TAGS])
    spare = -core.get_vocab_size() % VOCABULARY_MULTIPLE
    core.add_special_tokens([_added(f"<|spare_{index}|>", special=True) for index in range(spare)])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _byte_characters() -> list[str]:
    """The printable stand-in for each byte that byte-level tokenizers use, in byte order."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)]


def make_portable(out: Path) -> None:
    """Name the tokenizer class as every release of transformers knows it, and let others read the weights."""
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")
    (out / "model.safetensors").chmod(0o644)


def write_card(out: Path, parameters: int, learn: str, blur: str, sampled: float, greedy: float) -> None:
    card = CARD.format(parameters=parameters, learn=learn, blur=blur, sampled=sampled, greedy=greedy)
    (out / "README.md").write_text(card)
