"""outpace's part inside a vLLM server: a weight-transfer engine by the name of `outpace`.

This package lives in the server's environment, so it imports torch and vLLM and never outpace. A server that finds it
(entry-point group `vllm.general_plugins`) takes it with `--weight-transfer-config '{"backend": "outpace"}'`.
"""

from __future__ import annotations

BACKEND = "outpace"


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "outpace_vllm.engine", "OutpaceTransferEngine")
