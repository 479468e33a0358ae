"""outpace's vLLM plugin: a weight-transfer engine named `outpace`, and updates that run inside the engine core.

This package runs in the server's environment: it imports torch and vLLM, never outpace. vLLM finds it through the
entry-point group `vllm.general_plugins` and uses it with `--weight-transfer-config '{"backend": "outpace"}'`.
"""

from __future__ import annotations

BACKEND = "outpace"


def register() -> None:
    """Register the engine and patch the core. vLLM calls this in each of its processes, possibly more than once."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from outpace_vllm.core_update import run_updates_in_the_engine_core

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "outpace_vllm.engine", "OutpaceTransferEngine")
    run_updates_in_the_engine_core()
