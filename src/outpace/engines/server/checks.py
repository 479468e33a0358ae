"""Checks that a run can use a server: everything that would fail later, reported at the start in one line.

Each error names the server, what it has, what the run needs, and the flag or setting that fixes it. Checks run in the
order in which users hit the problems: a vLLM server without its dev mode does not even report the rest.

The run's tokenizer is compared with the server's on a few texts. Loading a tokenizer may import torch, which takes too
much memory for a server engine, so `python -m <this module> MODEL` does it in a subprocess while the server starts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from outpace.config import Config
from outpace.config.engines import PLUGIN_TRANSPORTS
from outpace.engines.server.commands import check_version, run_program, vllm_lora_rank
from outpace.engines.server.protocol import Server, ServerFacts
from outpace.errors import BadInput, ServerFailed, ServerFaulty, ServerGone, ServerRefused, ServerSilent, one_line
from outpace.hardware.placement import transport_of
from outpace.models.loading import BUILT_IN, SMOLLM2, load_tokenizer, resolve_model

ARCHITECTURE_KEYS = ("architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Config keys that must agree for two model directories to have the same architecture."""


async def check_server(server: Server, config: Config, tokens: dict[str, list[int]]) -> ServerFacts:
    """Return the server's info. Raises `BadInput` if the run cannot use the server. `tokens`: texts and their ids by
    the run's tokenizer."""
    with failures_explained(server.url):
        facts = await server.facts()
        check_version(facts.kind, facts.version, server.url)
        if problem := _first_problem(facts, config):
            raise BadInput(f"{server.url}: {problem}")
        await _check_tokenizer(server, facts, config, tokens)
    return facts


@contextmanager
def failures_explained(url: str) -> Iterator[None]:
    """Raise `BadInput` with what to check for a server that cannot be queried."""
    try:
        yield
    except ServerFailed as failed:
        raise BadInput(describe_failure(url, failed)) from failed


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


def _first_problem(facts: ServerFacts, config: Config) -> str | None:
    return next(chain(_sampling_problems(facts, config), _update_problems(facts, config)), None)


def _sampling_problems(facts: ServerFacts, config: Config) -> Iterator[str]:
    """Yield reasons why the server would sample from something other than the run's model."""
    sglang = facts.kind == "sglang"
    if not facts.controls:
        admin_key = "set the environment variable named by engine.api_key_env to its admin key"
        dev_mode = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        yield f"the server cannot be paused and updated; {admin_key if sglang else dev_mode}"
    if facts.logprobs not in (None, "processed_logprobs", "processed"):
        without = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"
        processed = "start it with --logprobs-mode processed_logprobs"
        yield (
            f"the server reports {facts.logprobs} logprobs, not those of the distribution it samples from; "
            f"{without if sglang else processed}"
        )
    root, model = str(facts.details.get("root") or facts.model), _model_name(config)
    if _is_another_model(root, model):
        yield f"the server has {root}, the run trains {model}; start it with the same model or change model.path"
    dtype = config.model.dtype
    if facts.dtype is not None and facts.dtype != dtype:
        yield f"the server uses {facts.dtype}, model.dtype is {dtype}; start it with --dtype {dtype}"
    context = config.engine.context
    if facts.context is not None and context is not None and facts.context < context:
        yield (
            f"the server's context is {facts.context} tokens, the run needs {context}; start it with "
            f"{'--context-length' if sglang else '--max-model-len'} {context} or lower engine.context"
        )


def _update_problems(facts: ServerFacts, config: Config) -> Iterator[str]:
    """Yield reasons why the server cannot load the run's weights."""
    sglang, transport, rank = facts.kind == "sglang", transport_of(config), config.lora.rank
    if not sglang and not rank and not facts.plugin:
        if transport in PLUGIN_TRANSPORTS:
            yield (
                f'weights.transport "{transport}" needs outpace\'s plugin; start the server with `outpace serve` '
                'or set weights.transport = "files"'
            )
        # On a CPU, vLLM computes the output head from a packed copy. If the head is tied to the embeddings, a reload
        # does not update the copy, and the server silently samples from old weights. The plugin fixes that.
        models = (_model_name(config), str(facts.details.get("root")))
        if facts.details.get("device") == "cpu" and any(_ties_embeddings(model) for model in models):
            yield (
                "a CPU server without outpace's plugin does not update the output head of this model, which is tied to "
                "its embeddings; start it with `outpace serve`"
            )
    if rank and not facts.adapters:
        also = "" if sglang else " and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
        yield f"the server does not accept adapters, which lora.rank needs; start it with --enable-lora{also}"
    most = facts.details.get("max_lora_rank")
    if isinstance(most, int) and most < rank:
        yield (
            f"the server accepts adapters up to rank {most}, lora.rank is {rank}; "
            f"start it with --max-lora-rank {rank if sglang else vllm_lora_rank(rank)} or lower lora.rank"
        )


def _ties_embeddings(model: str) -> bool:
    return _config_of(model).get("tie_word_embeddings") is True


def _is_another_model(server_model: str, run_model: str) -> bool:
    """Whether the models certainly differ. A server on another machine may have the same model under another path."""
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


def _model_name(config: Config) -> str:
    """The model directory if it is local, else its Hub name."""
    path = config.model.path
    is_here = path in BUILT_IN or path == SMOLLM2 or Path(path).expanduser().exists()
    return str(resolve_model(path)) if is_here else path


async def _check_tokenizer(server: Server, facts: ServerFacts, config: Config, tokens: dict[str, list[int]]) -> None:
    flag = "--tokenizer-path" if facts.kind == "sglang" else "--tokenizer"
    for text, ids in tokens.items():
        found = await server.tokenized(text)
        if found is not None and found != ids:
            raise BadInput(
                f"{server.url}: the server tokenizes {text!r} as {_shortened(found)}, the run as {_shortened(ids)}; "
                f"start it with {flag} {_model_name(config)}"
            )


def _shortened(ids: list[int]) -> str:
    return one_line(ids, 60)


TOKENIZER_TEXTS = (
    "What is 13 + 28?",
    " The answer\n\n\tis: 3.14 <end>",
    "naïve 東京 🙂",
    "def f(x_1):\n    return x_1**2",
)
"""Numbers, whitespace, other scripts, code: texts on which tokenizers are likely to differ."""

TOKENIZER_TIMEOUT_S = 180.0
"""Timeout for loading a tokenizer: it would hang forever on an unresponsive Hub."""

TRUST_FLAG = "--trust-remote-code"


async def expected_token_ids(model: str, trust_remote_code: bool) -> dict[str, list[int]]:
    """Texts and their token ids by the run's tokenizer."""
    trust_arguments = [TRUST_FLAG] if trust_remote_code else []
    argv = [sys.executable, "-m", __name__, model, *trust_arguments]
    code, answer, errors = await run_program(argv, TOKENIZER_TIMEOUT_S, f"model.path {model}: loading the tokenizer")
    if code:
        last = errors.rpartition("\n")[2]
        raise BadInput(f"model.path {model}: no usable tokenizer: {one_line(last)}")
    found: dict[str, list[int]] = json.loads(answer)
    return found


def print_token_ids(model: str, trust_remote_code: bool) -> None:
    tokenizer: Any = load_tokenizer(model, trust_remote_code=trust_remote_code)
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in TOKENIZER_TEXTS}
    print(json.dumps(ids))


if __name__ == "__main__":
    print_token_ids(sys.argv[1], TRUST_FLAG in sys.argv)
