"""Server addresses: refused URLs and the context length of the server engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from outpace.config import Config
from outpace.config.load import make_config
from outpace.engines.server.build import EngineSetup, _make_engine
from outpace.engines.server.launch import server_at
from outpace.engines.server.protocol import ServerFacts
from outpace.errors import BadInput
from outpace.hardware.placement import ON_CPU

URL = "http://127.0.0.1:1"


def config(**engine: object) -> Config:
    chosen = {f"engine.{key}": value for key, value in engine.items()}
    return make_config({"engine.kind": "vllm", "engine.urls": [URL], "weights.transport": "files", **chosen})


@pytest.mark.parametrize("url", ["http://me:hunter2@127.0.0.1:1", "me:hunter2@host", "https://hunter2@host"])
def test_an_address_with_a_password_is_refused_without_printing_the_password(url: str) -> None:
    with pytest.raises(BadInput, match=r"engine\.urls: .*engine\.api_key_env") as refused:
        config(urls=[url])
    assert "hunter2" not in str(refused.value)
    with pytest.raises(BadInput, match=r"engine\.api_key_env") as refused:  # a server that joins later
        server_at(config(), url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(("ours", "theirs", "longest"), [(512, 8192, 512), (None, 8192, 8192), (512, None, 512)])
async def test_the_context_is_limited_by_both_the_run_and_the_server(
    tmp_path: Path, ours: int | None, theirs: int | None, longest: int
) -> None:
    settings = config() if ours is None else config(context=ours)
    server, place = server_at(settings, URL), EngineSetup("engine-0", 0, URL, "run", tmp_path, tmp_path, ON_CPU)
    engine = _make_engine(settings, place, server, ServerFacts("vllm", "0.32", "m", context=theirs), None, False, None)
    assert engine._state.settings.context == longest
