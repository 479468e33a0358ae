"""The parts of the built-in models that are not weights: tokenizers, chat templates, what goes on disk.

Invariants:
- Token ids 0-255 are the bytes in order, so any UTF-8 text round-trips; what is merged from them follows.
- A digit is never merged with anything: numbers are written and read digit by digit.
- Every id of the vocabulary has a token: nothing the model can sample is undecodable.
- Rendering is append-only: a conversation's text is a prefix of the text of its continuation.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
SYSTEM, USER, ASSISTANT, TOOL = "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"
CONTROL = (PAD, BOS, END, SYSTEM, USER, ASSISTANT, TOOL)
TOOL_TAGS = ("<tool_call>", "</tool_call>")
VOCABULARY_MULTIPLE = 16
LONGEST_TOKEN = 12
"""In characters. Without a limit a whole tool call would become one token, and there would be nothing to write."""

Merge = tuple[str, str]

WHOLE_SCHEMAS = """\
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\nTo call one: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|end|>' }}
"""
SIGNATURES = """\
    {%- for tool in tools %}
        {%- set function = tool.function or tool %}
        {{- '\\n' + function.name + '(' }}
        {%- for name, value in ((function.parameters or {}).properties or {}).items() %}
            {{- (', ' if not loop.first else '') + name + ': ' + (value.type or 'any') | string }}
        {%- endfor %}
        {{- ')' + (': ' + function.description if function.description else '') }}
    {%- endfor %}
    {{- '<|end|>' }}
"""
"""Two ways to show tools: as JSON, or short, as one line each like `add(a: integer): Add one.`"""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|system|>' }}
    {%- if messages and messages[0].role == 'system' %}
        {{- messages[0].content + '\\n' }}
    {%- endif %}
    {{- 'Tools:' }}
TOOLS{%- endif %}
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


def learn_merges(corpus: Iterable[str], most: int) -> list[Merge]:
    """At most so many merges, the most useful in these texts first. Added tokens in them are left out."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = _pre_tokenizer(merging=True)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + most,
        initial_alphabet=_byte_characters(),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    added = re.compile("|".join(map(re.escape, (*CONTROL, *TOOL_TAGS))))
    core.train_from_iterator((part for text in corpus for part in added.split(text)), trainer)
    return [(left, right) for left, right in json.loads(core.to_str())["model"]["merges"]]


def _pre_tokenizer(merging: bool) -> pre_tokenizers.PreTokenizer:
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if not merging:
        return bytes_alone
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_alone])


def make_tokenizer(merges: Sequence[Merge] = (), tools: str = WHOLE_SCHEMAS) -> PreTrainedTokenizerFast:
    """`tools` is the part of the chat template that shows them."""
    tokens = [*_byte_characters(), *(left + right for left, right in merges)]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=list(merges)))
    core.pre_tokenizer = _pre_tokenizer(merging=bool(merges))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([_added(token, special=True) for token in CONTROL])
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
    tokenizer.chat_template = CHAT_TEMPLATE.replace("TOOLS", tools)
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
