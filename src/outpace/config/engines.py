"""Settings of inference engines and servers, weight sync and LoRA; comparison of server addresses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from outpace.config.base import OpenedBy, Section
from outpace.types import LoraAdapter

DEFAULT_SLOTS = 64

OfEmbedded = OpenedBy("kind", values=("embedded",))
OfServers = OpenedBy("kind", values=("vllm", "sglang"))


class EngineConfig(Section):
    """Inference engines: embedded, vLLM or SGLang.

    `engine.kind` decides which of the other keys apply: `engine.decoder` to the embedded engine, `engine.urls` and
    those from `engine.api_key_env` on to servers.
    """

    kind: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Engine kind: the embedded engine, or vLLM or SGLang servers reached over HTTP."""
    count: int | None = Field(default=None, ge=1)
    """Number of engines. Default: 1, or the number of `urls`."""
    urls: Annotated[list[str], OfServers] = []
    """URLs of running servers, such as `http://host:8000`. If empty, outpace starts the servers: see `launch`."""
    slots: int | None = Field(default=None, ge=1)
    """Maximum sequences that one engine decodes concurrently. Default: 64; for the built-in models as many as a
    batch has attempts, between 64 and 512."""
    kv: Literal["keep", "recompute"] = "keep"
    """KV cache of running sequences after a weight update: keep it, or recompute it with the new weights."""
    context: int | None = Field(default=None, ge=2)
    """Maximum sequence length, including the prompt. Default: the model's limit; with `run.deterministic` 256 for
    `starter` and 512 for `starter-agent`."""
    threads: int | None = Field(default=None, ge=1)
    """Maximum CPU compute threads of one engine; it uses fewer where more do not help. Default: run.threads, or as many
    as the machine's load allows."""
    decoder: Annotated[Literal["auto", "fast", "general"], OfEmbedded] = "auto"
    """Decoder of the embedded engine: `fast` supports the Llama family, `general` any causal LM; `auto` picks one."""
    api_key_env: Annotated[str, OfServers] = "OUTPACE_ENGINE_API_KEY"
    """Environment variable that holds the servers' API key. May be unset if the servers need no key."""
    retries: Annotated[int, OfServers] = Field(default=2, ge=0)
    """Retries of a failed query or control call to a server. Requests for tokens are not counted: a failed one is
    continued on another engine, or on the same one if there is no other."""
    idle_s: Annotated[float, OfServers] = Field(default=60.0, gt=0)
    """A request that has produced no token for this long is considered lost. Pauses of its server do not count."""
    control_s: Annotated[float, OfServers] = Field(default=120.0, gt=0)
    """Timeout of one call that pauses, updates or resumes a server."""
    probe_s: Annotated[float, OfServers] = Field(default=5.0, gt=0)
    """Interval between health probes; a probe samples one token."""
    probe_deadline_s: Annotated[float, OfServers] = Field(default=10.0, gt=0)
    """Timeout of a health probe. After three consecutive timeouts the server is considered dead."""
    seeded: Annotated[bool, OfServers] = False
    """Send a seed with every request. Slows down sampling, and still does not make servers exactly reproducible."""

    @property
    def resolved_slots(self) -> int:
        return self.slots or DEFAULT_SLOTS


class LaunchConfig(Section):
    """Inference servers that outpace starts.

    These settings apply if `engine.kind` is `vllm` or `sglang` and `engine.urls` is empty.
    """

    python: str | None = None
    """Python executable of the environment with vLLM or SGLang. Default: the Python that runs outpace."""
    args: list[str] = []
    """Extra server arguments, such as `["--tensor-parallel-size", "2"]`. They take precedence over outpace's own."""
    env: dict[str, str] = {}
    """Extra environment variables of the server."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first server; further servers use the following ports. 0 picks free ports."""
    start_s: float = Field(default=600.0, gt=0)
    """Timeout from the start of a server to its first completed request."""
    gpu_memory: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of its GPU's memory that each server uses. Default: the servers on a GPU share 0.9 of it, or 0.4 if the
    learner runs there too."""

    @field_validator("env", mode="before")
    @classmethod
    def _numbers_to_text(cls, env: Any) -> Any:
        """Accept numbers, as in `X = 1`: environment variables are always text."""
        if not isinstance(env, dict):
            return env
        return {
            name: str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for name, v in env.items()
        }


PLUGIN_TRANSPORTS = ("memory", "ipc", "collective")
"""Values of `weights.transport` that need outpace's plugin in the server."""


class WeightsConfig(Section):
    """Weight sync from the learner to the engines."""

    every: int = Field(default=1, ge=1)
    """Interval in steps at which new weights are published, at most `pacing.max_lag` + 1."""
    update: Literal["inflight", "drain"] = "inflight"
    """`inflight` updates weights while sequences are being sampled; `drain` lets running groups finish first."""
    transport: str = "auto"
    """Transport of weights to a server: `files` (any server), `memory` (shared memory, same machine as the learner),
    `ipc` (CUDA IPC, same GPU as the learner), `collective` (NCCL, or gloo without a GPU) or
    `package.module:function`. `memory`, `ipc` and `collective` need outpace's plugin in the server; servers that
    outpace starts have it. `auto` chooses by what is available."""
    delta: bool = False
    """Publish only the changes since the last version, as a file, to engines that support it."""
    dir: str | None = None
    """Directory for weight files, readable by the servers. With a learner on several machines all must see it. Default:
    a memory-backed directory, or the run directory if the learner is on several machines; removed with the run."""


class LoraConfig(Section):
    """LoRA adapters."""

    rank: int = Field(default=0, ge=0)
    """LoRA rank; 0 trains the full model. Needs the package `peft`: `pip install 'outpace[lora]'`. vLLM supports
    ranks up to 512."""
    alpha: Annotated[float | None, OpenedBy("rank")] = Field(default=None, gt=0)
    """LoRA alpha: the adapter output is scaled by alpha / rank. Default: twice the rank."""
    targets: Annotated[list[str], OpenedBy("rank")] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    """Linear layers that get an adapter, by name suffix. An output head tied to the embeddings cannot have one."""

    @property
    def adapter(self) -> LoraAdapter | None:
        """The adapter to train, or None if the full model is trained. Needs a resolved config."""
        if self.rank == 0:
            return None
        assert self.alpha is not None, "the config must be resolved"
        return LoraAdapter(self.rank, self.alpha, list(self.targets))


_DEFAULT_PORTS = {"http": 80, "https": 443}
_LOOPBACK = ("127.0.0.1", "::1", "0.0.0.0", "::", "localhost")


class ServerAddress(NamedTuple):
    """A normalized server address. Equal for all spellings: case, default port, trailing slash, names of localhost."""

    scheme: str
    host: str
    port: int | None
    path: str


def server_address(url: str) -> ServerAddress:
    """Return the normalized address of a URL. Text that is not a URL is equal only to itself."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:  # the port is not a number, or too large
        return ServerAddress("", url, None, "")
    return ServerAddress(parts.scheme, "localhost" if host in _LOOPBACK else host, port, parts.path.rstrip("/"))


def is_server_url(url: str) -> bool:
    """Return whether `url` is a server URL such as `http://host:8000`; port and path are optional."""
    try:
        parts = urlsplit(url)
        return parts.scheme in _DEFAULT_PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
