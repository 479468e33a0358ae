"""Whether a server is one that a run can use: everything that would go wrong later, told at once and in one line.

Each complaint names the server, what it has, what the run needs, and the flag or setting that mends it. The order is
that of what users stumble over: a server without its dev mode does not even say what else is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outpace.engines.servers.choices import vllm_lora_rank
from outpace.engines.servers.spec import Facts, Server, Wanted
from outpace.engines.servers.starting.versions import refuse_old
from outpace.errors import BadInput, ServerFailed, ServerFaulty, ServerGone, ServerRefused, ServerSilent, one_line

SHAPE = ("architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""What two directories must agree in to hold the same model, whatever its weights."""


async def check(server: Server, wanted: Wanted) -> Facts:
    """What the server says of itself; `BadInput` where the run cannot use it."""
    try:
        facts = await server.facts()
        _refuse_by_rules(server.url, facts, wanted)
        await _refuse_other_tokenizer(server, facts, wanted)
    except ServerFailed as failed:
        raise BadInput(trouble(server.url, failed)) from failed
    return facts


def trouble(url: str, failed: ServerFailed) -> str:
    """Why a server cannot even be asked, and what to look at."""
    said = one_line(failed).removeprefix(url).lstrip("/: ")
    match failed:
        case ServerRefused(status=401 | 403):
            return f"{url}: it wants a key; put it into the environment variable that engine.api_key_env names"
        case ServerRefused() | ServerFaulty():
            return f"{url}: something answers there that is no such server ({said}); look at engine.urls, engine.kind"
        case ServerSilent():
            return f"{url}: it takes connections and gives no answer ({said}); is the server stopped, or overloaded?"
        case ServerGone() if "certificate" in said:
            return f"{url}: {said}; set SSL_CERT_FILE to the certificate of whoever has signed it"
        case ServerGone() if "Connect call failed" in said:
            return f"{url}: nothing listens there; is it the right port, and is the server up?"
        case ServerGone() if "TLS" not in said:
            return f"{url}: it cannot be reached ({said}); is it the right address, and is the server up?"
    return f"{url}: {said}"


# ------------------------------------------------------------------------------------------------------------- rules


def _refuse_by_rules(url: str, facts: Facts, wanted: Wanted) -> None:
    refuse_old(facts.kind, facts.version, url)
    for rule in (_controls, _logprobs, _model, _dtype, _context, _plugin, _tied, _adapters, _lora_rank):
        for complaint in rule(facts, wanted):
            raise BadInput(f"{url}: {complaint}")


def _controls(facts: Facts, wanted: Wanted) -> Iterator[str]:
    if not facts.controls:
        vllm = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        sglang = "the variable that engine.api_key_env names must hold its admin key"
        yield f"it cannot be paused and updated; {sglang if facts.kind == 'sglang' else vllm}"


def _logprobs(facts: Facts, wanted: Wanted) -> Iterator[str]:
    if facts.logprobs not in (None, "processed_logprobs", "processed"):
        vllm = "start it with --logprobs-mode processed_logprobs"
        sglang = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"
        yield (
            f"its logprobs are {facts.logprobs}, not those of the distribution that it samples from; "
            f"{sglang if facts.kind == 'sglang' else vllm}"
        )


def _model(facts: Facts, wanted: Wanted) -> Iterator[str]:
    root = str(facts.details.get("root") or facts.model)
    if _is_another_model(root, wanted.model):
        yield f"it serves {root}, the run trains {wanted.model}; start it with the same model, or change model.path"


def _dtype(facts: Facts, wanted: Wanted) -> Iterator[str]:
    if facts.dtype is not None and facts.dtype != wanted.dtype:
        yield f"it computes in {facts.dtype}, model.dtype is {wanted.dtype}; start it with --dtype {wanted.dtype}"


def _context(facts: Facts, wanted: Wanted) -> Iterator[str]:
    if facts.context is not None and wanted.context is not None and facts.context < wanted.context:
        flag = "--context-length" if facts.kind == "sglang" else "--max-model-len"
        yield (
            f"its context is {facts.context} tokens, the run needs {wanted.context}; "
            f"start it with {flag} {wanted.context}, or lower engine.context"
        )


def _plugin(facts: Facts, wanted: Wanted) -> Iterator[str]:
    if facts.kind == "vllm" and wanted.transport != "files" and not wanted.adapters and not facts.plugin:
        yield (
            f'weights.transport "{wanted.transport}" needs outpace\'s plugin in it; start it with `outpace serve`, '
            'or set weights.transport = "files"'
        )


def _tied(facts: Facts, wanted: Wanted) -> Iterator[str]:
    """Without a GPU vLLM computes its output head from a packed copy, which a reload leaves as it was where the head is
    tied to the embeddings: it would sample by old weights without a word. The plugin mends that."""
    if facts.kind != "vllm" or facts.details.get("device") != "cpu" or facts.plugin or wanted.adapters:
        return
    if _ties(wanted.model) or _ties(str(facts.details.get("root"))):
        yield (
            "it has no GPU and not outpace's plugin, and would leave the output head as it is, which this model ties "
            "to its embeddings; start it with `outpace serve`"
        )


def _ties(model: str) -> bool:
    return _config_of(model).get("tie_word_embeddings") is True


def _adapters(facts: Facts, wanted: Wanted) -> Iterator[str]:
    if wanted.adapters and not facts.adapters:
        also = "" if facts.kind == "sglang" else " and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
        yield f"it takes no adapters, lora.rank needs them; start it with --enable-lora{also}"


def _lora_rank(facts: Facts, wanted: Wanted) -> Iterator[str]:
    most = facts.details.get("max_lora_rank")
    if wanted.adapters and isinstance(most, int) and most < wanted.lora_rank:
        rank = wanted.lora_rank if facts.kind == "sglang" else vllm_lora_rank(wanted.lora_rank)
        yield (
            f"it takes adapters of rank {most} at most, lora.rank is {wanted.lora_rank}; "
            f"start it with --max-lora-rank {rank}, or lower lora.rank"
        )


def _is_another_model(theirs: str, ours: str) -> bool:
    """As far as can be told: a server on another machine may have the same model under another name."""
    if theirs == ours:
        return False
    their_shape, our_shape = _shape(theirs), _shape(ours)
    if their_shape and our_shape:
        return their_shape != our_shape
    return not _is_path(theirs) and not _is_path(ours)


def _shape(model: str) -> dict[str, Any]:
    """Of a model in a directory of this machine; nothing otherwise."""
    content = _config_of(model)
    return {key: content.get(key) for key in SHAPE} if content else {}


def _config_of(model: str) -> dict[str, Any]:
    """The `config.json` of a model in a directory of this machine; nothing otherwise."""
    try:
        content = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or Path(model).exists()


async def _refuse_other_tokenizer(server: Server, facts: Facts, wanted: Wanted) -> None:
    flag = "--tokenizer-path" if facts.kind == "sglang" else "--tokenizer"
    for text, ids in wanted.tokenizer.items():
        found = await server.tokenized(text)
        if found is not None and found != ids:
            raise BadInput(
                f"{server.url}: its tokenizer reads {text!r} as {_shown(found)}, that of {wanted.model} as "
                f"{_shown(ids)}; start it with the run's own, {flag} {wanted.model}"
            )


def _shown(ids: list[int]) -> str:
    return one_line(ids, 60)
