"""The settings of everything around an agent: its tools, its environment, its gateway, and judges of what it did."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outpace.config.section import Section


class ToolsConfig(Section):
    """Functions and MCP servers that the model may call."""

    functions: list[str] = []
    """Typed, documented Python functions that the model may call, `package.module:function`; sync or async."""
    mcp: list[str] = []
    """MCP servers whose tools the model may call: each a URL, or a command line that speaks on its standard streams."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How long one call may take before the model is told that it did not come back."""
    max_result_chars: int = Field(default=16384, ge=16)
    """A longer result is cut, and the model is told so."""


class EnvironmentConfig(Section):
    """Multi-turn environments: kinds, isolation, limits."""

    kinds: dict[str, str] = {}
    """Several environments in one run: a name for each, `package.module:Class`. A column of the task chooses."""
    column: str = "environment"
    """The column that names the kind."""
    isolation: Literal["thread", "process"] = "thread"
    """Where plain methods run: on threads of the worker, or each environment in a process that can be killed."""
    reuse: bool = False
    """Use an instance again for later episodes, after another `reset`, instead of making a fresh one each time."""
    timeout_s: float = Field(default=60.0, gt=0)
    """How long making an environment, `reset` or `get_reward` may take; a tool call has tools.timeout_s."""
    memory_mb: int | None = Field(default=None, ge=256)
    """Address space of each environment's process; no limit when absent."""


class GatewayConfig(Section):
    """The OpenAI-compatible endpoint for agents."""

    host: str = "127.0.0.1"
    """The address on which a worker offers its OpenAI-compatible endpoint, once an agent asks for it."""
    port: int = Field(default=0, ge=0, le=65535)
    """Its port; 0 takes a free one. With several workers the next ones take the following ports."""


class JudgeConfig(Section):
    """The model behind the reward function `judge`."""

    base_url: str | None = None
    """An OpenAI-compatible endpoint, such as `http://host:8000/v1`, for the reward function `judge`."""
    model: str | None = None
    """The name of the model that judges."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; a server that wants none may leave it unset."""
    prompt: str | None = None
    """What the judge is asked, with `{prompt}`, `{completion}` and columns in braces; absent: a question of our own."""
    scale: float = Field(default=10.0, gt=0)
    """The score that counts as 1. The judge's number is divided by it, and cut to 0 and 1."""
    max_tokens: int = Field(default=512, ge=1)
    """Token limit of a judgement."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""
    timeout_s: float = Field(default=60.0, gt=0)
    """How long one request to the judge may take."""
    retries: int = Field(default=2, ge=0)
    """How often a request is tried again that failed on the way or with a 5xx or 429; 4xx is final."""
    concurrency: int = Field(default=16, ge=1)
    """Requests to the judge under way at once, per rollout worker."""


class SandboxConfig(Section):
    """Limits of programs that the model wrote."""

    timeout_s: float = Field(default=5.0, gt=0)
    """How long a model-written program may run, per test."""
    memory_mb: int = Field(default=512, ge=64)
    """Its address space."""
    processes: int = Field(default=16, ge=1)
    """Processes and threads that it may have at once, where the system can count them."""
    output_kb: int = Field(default=64, ge=1)
    """What is kept of its output; more is dropped."""
    file_mb: int = Field(default=16, ge=0)
    """The largest file that it may write."""
    workers: int = Field(default=2, ge=1)
    """Programs that run at once, per rollout worker."""
