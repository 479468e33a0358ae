"""MERGED"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outpace.config.section import Section


class ToolsConfig(Section):
    """Tools: Python functions and MCP servers that the model can call."""

    functions: list[str] = []
    """Python functions offered as tools, as `package.module:function`. They need type hints and a docstring; sync or
    async."""
    mcp: list[str] = []
    """MCP servers offered as tools: each a URL, or a command line that uses the stdio transport."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Timeout of one tool call. On timeout the model gets an error as the tool result."""
    max_result_chars: int = Field(default=16384, ge=16)
    """Longer results are truncated, with a note to the model."""


class EnvironmentConfig(Section):
    """Multi-turn environments: classes, isolation and limits.

    To use a single environment, set `rollout.environment`.
    """

    kinds: dict[str, str] = {}
    """Several environments in one run: name to `package.module:Class`. The task column `column` selects one."""
    column: str = "environment"
    """Task column that holds the environment name."""
    isolation: Literal["thread", "process"] = "thread"
    """Where sync methods run: on threads of the worker, or each environment in its own process, which can be killed."""
    reuse: bool = False
    """Reuse an instance for later episodes after another `reset`, instead of creating a new one each time."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Timeout of the constructor, `reset` and `get_reward`. Tool calls use tools.timeout_s."""
    memory_mb: int | None = Field(default=None, ge=256)
    """Address space limit of each environment process. Default: no limit."""


class GatewayConfig(Section):
    """OpenAI-compatible endpoint for agents."""

    host: str = "127.0.0.1"
    """Address that each worker binds its endpoint to. The endpoint starts when an agent first needs it."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first worker's endpoint; further workers use the following ports. 0 picks free ports."""


class JudgeConfig(Section):
    """LLM judge used by the reward function `judge`."""

    base_url: str | None = None
    """OpenAI-compatible endpoint of the judge, such as `http://host:8000/v1`."""
    model: str | None = None
    """Model name sent to the endpoint."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key. May be unset if the server needs no key."""
    prompt: str | None = None
    """Prompt template with `{prompt}`, `{completion}` and task columns in braces. Default: a built-in template."""
    scale: float = Field(default=10.0, gt=0)
    """Score that counts as reward 1. The judge's score is divided by it and clamped to [0, 1]."""
    max_tokens: int = Field(default=512, ge=1)
    """Token limit of one judge completion."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Timeout of one judge request."""
    retries: int = Field(default=2, ge=0)
    """Retries after a connection error, a 5xx or a 429. Other 4xx responses are not retried."""
    concurrency: int = Field(default=16, ge=1)
    """Maximum concurrent judge requests per rollout worker."""


class SandboxConfig(Section):
    """Sandbox limits for model-written programs."""

    timeout_s: float = Field(default=5.0, gt=0)
    """Timeout of a program, per test."""
    memory_mb: int = Field(default=512, ge=64)
    """Address space limit of a program."""
    processes: int = Field(default=16, ge=1)
    """Maximum concurrent processes and threads of a program, where the system supports this limit."""
    output_kb: int = Field(default=64, ge=1)
    """Output kept from a program; the rest is dropped."""
    file_mb: int = Field(default=16, ge=0)
    """Maximum size of a file that a program writes."""
    workers: int = Field(default=2, ge=1)
    """Programs run concurrently per rollout worker."""
