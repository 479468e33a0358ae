"""The settings of who samples: engines, the servers behind them, and how weights reach them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from outpace.config.section import Section

SLOTS = 64


class EngineConfig(Section):
    """The inference engines: built in, vLLM or SGLang."""

    kind: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Who samples: the engine built into outpace, or servers that are reached over HTTP."""
    count: int | None = Field(default=None, ge=1)
    """How many engines. Default: one, or as many as there are `urls`."""
    urls: list[str] = []
    """Servers that are running already, such as `http://host:8000`. Without them servers are started: see `launch`."""
    slots: int | None = Field(default=None, ge=1)
    """Sequences that one engine decodes together. Default: 64; for the built-in models half of a batch's attempts, at
    least 64 and at most 256."""
    kv: Literal["keep", "recompute"] = "keep"
    """After a weight swap, running sequences keep their keys and values or recompute them."""
    context: int | None = Field(default=None, ge=2)
    """Longest sequence, prompt included; the model's own limit when absent."""
    threads: int | None = Field(default=None, ge=1)
    """Most compute threads of one engine, which takes fewer where more do not help. Default: run.threads, or as many as
    the load of the machine allows."""
    path: Literal["auto", "fast", "general"] = "auto"
    """Of the embedded engine: `fast` is for the Llama family, `general` for any causal LM; auto picks."""
    api_key_env: str = "OUTPACE_ENGINE_API_KEY"
    """The environment variable with the key that servers want; one that wants none may leave it unset."""
    retries: int = Field(default=2, ge=0)
    """How often a request that a server failed is made again there, from what it had, before another engine gets it."""
    idle_s: float = Field(default=60.0, gt=0)
    """A request that has given no token for so long, its server's pauses left out, is taken for lost."""
    control_s: float = Field(default=120.0, gt=0)
    """How long one call that pauses, updates or resumes a server may take."""
    probe_s: float = Field(default=5.0, gt=0)
    """How often a server is asked for one token, to see whether it works."""
    probe_deadline_s: float = Field(default=10.0, gt=0)
    """How long that may take. Three in a row that do not come back, and the server is dead."""
    seeded: bool = False
    """Send a seed with every request. Servers sample more slowly with it, and are not exactly repeatable even so."""

    @property
    def resolved_slots(self) -> int:
        return self.slots or SLOTS


class LaunchConfig(Section):
    """The inference servers that outpace starts."""

    python: str | None = None
    """The Python of the environment that vLLM or SGLang is installed in. Default: the one that outpace runs in."""
    args: list[str] = []
    """Further arguments of the server, as `["--tensor-parallel-size", "2"]`; they win over outpace's own."""
    env: dict[str, str] = {}
    """Further environment variables of the server."""
    port: int = Field(default=0, ge=0, le=65535)
    """The port of the first server, the next ones follow; 0 takes free ones."""
    start_s: float = Field(default=600.0, gt=0)
    """How long a server may take until it has answered a first request."""
    gpu_memory: float | None = Field(default=None, gt=0, lt=1)
    """The share of its GPU's memory that each server takes. Default: servers take 0.9 of a GPU together, 0.4 beside the
    learner."""

    @field_validator("env", mode="before")
    @classmethod
    def _numbers_are_text(cls, env: Any) -> Any:
        """An environment knows nothing but text; who writes `X = 1` means that."""
        if not isinstance(env, dict):
            return env
        return {
            name: str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for name, v in env.items()
        }


class WeightsConfig(Section):
    """How new weights reach the engines."""

    every: int = Field(default=1, ge=1)
    """Publish after every so many steps."""
    update: Literal["inflight", "drain"] = "inflight"
    """Swap while sequences are being sampled, or let running groups finish first."""
    transport: Literal["auto", "files", "memory", "ipc", "collective"] = "auto"
    """How weights reach a server: `files` it reads (any server), `memory` of the learner's machine, `ipc` for one on
    the learner's GPU, `collective` (NCCL, or gloo without a GPU). All but `files` need outpace's plugin in the server,
    which those that outpace starts have. Default: by what there is."""
    delta: bool = False
    """Write what has changed since the last published version to a file, and let engines read that where they can."""
    dir: str | None = None
    """Where those files go: a directory that the servers can read. Default: in memory, gone with the run."""


class LoraConfig(Section):
    """Low-rank adapters."""

    rank: int = Field(default=0, ge=0)
    """Train adapters of this rank and leave the model as it is; 0: train the model. Needs the package `peft`."""
    alpha: float | None = Field(default=None, gt=0)
    """What an adapter adds is scaled by this over the rank. Default: twice the rank."""
    targets: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """The linear layers that get an adapter, by the ends of their names."""
