"""What follows for a door from an address and what answers there."""

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
def test_an_address_with_a_password_is_refused_without_a_word_of_it(url: str) -> None:
    with pytest.raises(BadInput, match=r"engine\.urls: .*engine\.api_key_env") as refused:
        config(urls=[url])
    assert "hunter2" not in str(refused.value)
    with pytest.raises(BadInput, match=r"engine\.api_key_env") as refused:  # of one that joins later
        server_at(config(), url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(("ours", "theirs", "longest"), [(512, 8192, 512), (None, 8192, 8192), (512, None, 512)])
async def test_no_sequence_outgrows_what_the_run_allows_nor_what_the_server_takes(
    tmp_path: Path, ours: int | None, theirs: int | None, longest: int
) -> None:
    settings = config() if ours is None else config(context=ours)
    server, place = server_at(settings, URL), EngineSetup("engine-0", 0, URL, "run", tmp_path, tmp_path, ON_CPU)
    door = _make_engine(settings, place, server, ServerFacts("vllm", "0.32", "m", context=theirs), None, False, None)
    assert door._state.settings.context == longest
