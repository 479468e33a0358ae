"""Checks that a run can use a server: everything that would fail later, reported at the start in one line.

Each error names the server, what it has, what the run needs, and the flag or setting that fixes it. Checks run in the
order in which users hit the problems: a vLLM server without its dev mode does not even report the rest.

The run's tokenizer is compared with the server's on a few texts. Loading a tokenizer may import torch, which a server
engine does not have room for, so `python -m <this module> MODEL` does it in a subprocess while the server starts.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outpace.engines.server.commands import check_version, vllm_lora_rank
from outpace.engines.server.protocol import ServerFacts, ServerRequirements
from outpace.engines.server.server_base import Server
from outpace.errors import BadInput, ServerFailed, ServerFaulty, ServerGone, ServerRefused, ServerSilent, one_line
from outpace.models.loading import load_tokenizer

ARCHITECTURE_KEYS = ("architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Config keys that must agree for two model directories to have the same architecture."""


async def check_server(server: Server, wanted: ServerRequirements) -> ServerFacts:
    """Return the server's info. Raises `BadInput` if the run cannot use the server."""
    try:
        facts = await server.facts()
        _check_info(server.url, facts, wanted)
        await _check_tokenizer(server, facts, wanted)
    except ServerFailed as failed:
        raise BadInput(describe_failure(server.url, failed)) from failed
    return facts


def describe_failure(url: str, failed: ServerFailed) -> str:
    """One line for a server that cannot be queried: the cause, and what to check."""
    cause = one_line(failed).removeprefix(url).lstrip("/: ")
    match failed:
        case ServerRefused(status=401 | 403):
            return f"{url}: the server requires an API key; set the environment variable named by engine.api_key_env"
        case ServerRefused() | ServerFaulty():
            return f"{url}: not a server of this kind ({cause}); check engine.urls and engine.kind"
        case ServerSilent():
            return f"{url}: the server accepts connections but does not answer ({cause}); is it stopped or overloaded?"
        case ServerGone() if "certificate" in cause:
            return f"{url}: {cause}; set SSL_CERT_FILE to the certificate of its issuer"
        case ServerGone() if "Connect call failed" in cause:
            return f"{url}: nothing listens there; check the port, and whether the server is running"
        case ServerGone() if "TLS" not in cause:
            return f"{url}: cannot be reached ({cause}); check the address, and whether the server is running"
    return f"{url}: {cause}"


# ------------------------------------------------------------------------------------------------------------- rules


def _check_info(url: str, facts: ServerFacts, wanted: ServerRequirements) -> None:
    check_version(facts.kind, facts.version, url)
    for rule in _RULES:
        for complaint in rule(facts, wanted):
            raise BadInput(f"{url}: {complaint}")


def _check_controls(facts: ServerFacts, wanted: ServerRequirements) -> Iterator[str]:
    if not facts.controls:
        vllm = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        sglang = "set the environment variable named by engine.api_key_env to its admin key"
        yield f"the server cannot be paused and updated; {sglang if facts.kind == 'sglang' else vllm}"


def _check_logprobs(facts: ServerFacts, wanted: ServerRequirements) -> Iterator[str]:
    if facts.logprobs not in (None, "processed_logprobs", "processed"):
        vllm = "start it with --logprobs-mode processed_logprobs"
        sglang = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"
        yield (
            f"the server reports {facts.logprobs} logprobs, not those of the distribution it samples from; "
            f"{sglang if facts.kind == 'sglang' else vllm}"
        )


def _check_model(facts: ServerFacts, wanted: ServerRequirements) -> Iterator[str]:
    root = str(facts.details.get("root") or facts.model)
    if _is_another_model(root, wanted.model):
        yield f"the server has {root}, the run trains {wanted.model}; start it with the same model or change model.path"


def _check_dtype(facts: ServerFacts, wanted: ServerRequirements) -> Iterator[str]:
    if facts.dtype is not None and facts.dtype != wanted.dtype:
        yield f"the server uses {facts.dtype}, model.dtype is {wanted.dtype}; start it with --dtype {wanted.dtype}"


def _check_context(facts: ServerFacts, wanted: ServerRequirements) -> Iterator[str]:
    if facts.context is not None and wanted.context is not None and facts.context < wanted.context:
        flag = "--context-length" if facts.kind == "sglang" else "--max-model-len"
        yield (
            f"the server's context is {facts.context} tokens, the run needs {wanted.context}; "
            f"start it with {flag} {wanted.context} or lower engine.context"
        )


def _check_plugin(facts: ServerFacts, wanted: ServerRequirements) -> Iterator[str]:
    if facts.kind == "vllm" and wanted.transport != "files" and not wanted.adapters and not facts.plugin:
        yield (
            f'weights.transport "{wanted.transport}" needs outpace\'s plugin; start the server with `outpace serve` '
            'or set weights.transport = "files"'
        )


def _check_tied_head(facts: ServerFacts, wanted: ServerRequirements) -> Iterator[str]:
    """On a CPU, vLLM computes the output head from a packed copy. If the head is tied to the embeddings, a reload does
    not update the copy, and the server silently samples from old weights. The plugin fixes that."""
    if facts.kind != "vllm" or facts.details.get("device") != "cpu" or facts.plugin or wanted.adapters:
        return
    if _ties_embeddings(wanted.model) or _ties_embeddings(str(facts.details.get("root"))):
        yield (
            "a CPU server without outpace's plugin does not update the output head of this model, which is tied to its "
            "embeddings; start it with `outpace serve`"
        )


def _ties_embeddings(model: str) -> bool:
    return _config_of(model).get("tie_word_embeddings") is True


def _check_adapters(facts: ServerFacts, wanted: ServerRequirements) -> Iterator[str]:
    if wanted.adapters and not facts.adapters:
        also = "" if facts.kind == "sglang" else " and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
        yield f"the server does not accept adapters, which lora.rank needs; start it with --enable-lora{also}"


def _check_lora_rank(facts: ServerFacts, wanted: ServerRequirements) -> Iterator[str]:
    most = facts.details.get("max_lora_rank")
    if wanted.adapters and isinstance(most, int) and most < wanted.lora_rank:
        rank = wanted.lora_rank if facts.kind == "sglang" else vllm_lora_rank(wanted.lora_rank)
        yield (
            f"the server accepts adapters up to rank {most}, lora.rank is {wanted.lora_rank}; "
            f"start it with --max-lora-rank {rank} or lower lora.rank"
        )


_RULES = (
    _check_controls,
    _check_logprobs,
    _check_model,
    _check_dtype,
    _check_context,
    _check_plugin,
    _check_tied_head,
    _check_adapters,
    _check_lora_rank,
)


def _is_another_model(server_model: str, run_model: str) -> bool:
    """Whether the two models surely differ. A server on another machine may have the same model under another path."""
    if server_model == run_model:
        return False
    server_shape, run_shape = _shape(server_model), _shape(run_model)
    if server_shape and run_shape:
        return server_shape != run_shape
    return not _is_path(server_model) and not _is_path(run_model)


def _shape(model: str) -> dict[str, Any]:
    """Architecture keys of a local model directory; empty if there is none."""
    content = _config_of(model)
    return {key: content.get(key) for key in ARCHITECTURE_KEYS} if content else {}


def _config_of(model: str) -> dict[str, Any]:
    """The `config.json` of a local model directory; empty if there is none."""
    try:
        content = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or Path(model).exists()


async def _check_tokenizer(server: Server, facts: ServerFacts, wanted: ServerRequirements) -> None:
    flag = "--tokenizer-path" if facts.kind == "sglang" else "--tokenizer"
    for text, ids in wanted.tokenizer.items():
        found = await server.tokenized(text)
        if found is not None and found != ids:
            raise BadInput(
                f"{server.url}: the server tokenizes {text!r} as {_shortened(found)}, the run as {_shortened(ids)}; "
                f"start it with {flag} {wanted.model}"
            )


def _shortened(ids: list[int]) -> str:
    return one_line(ids, 60)


TOKENIZER_TEXTS = (
    "What is 13 + 28?",
    " The answer\n\n\tis: 3.14 <end>",
    "naïve 東京 🙂",
    "def f(x_1):\n    return x_1**2",
)
"""Numbers, whitespace, other scripts, code: the texts on which tokenizers differ first."""

TOKENIZER_TIMEOUT_S = 180.0
"""Timeout for loading a tokenizer: it would hang forever on an unresponsive Hub."""

TRUST_FLAG = "--trust-remote-code"


async def expected_token_ids(model: str, trust_remote_code: bool) -> dict[str, list[int]]:
    """Texts and their token ids by the run's tokenizer."""
    trust_arguments = [TRUST_FLAG] if trust_remote_code else []
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, model, *trust_arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(TOKENIZER_TIMEOUT_S):
            answer, errors = await process.communicate()
    except TimeoutError:
        raise BadInput(f"model.path {model}: the tokenizer did not load within {TOKENIZER_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise BadInput(f"model.path {model}: no usable tokenizer: {one_line(last)}")
    found: dict[str, list[int]] = json.loads(answer)
    return found


def print_token_ids(model: str, trust_remote_code: bool) -> None:
    tokenizer: Any = load_tokenizer(model, trust_remote_code=trust_remote_code)
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in TOKENIZER_TEXTS}
    print(json.dumps(ids))


if __name__ == "__main__":
    print_token_ids(sys.argv[1], TRUST_FLAG in sys.argv)
