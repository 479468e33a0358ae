"""What the run's tokenizer makes of some texts, to hold against a server's own.

A tokenizer may bring torch along, which a door has no room for: it is loaded in a process of its own, `python -m
outpace.engines.servers.starting.tokens MODEL`, while the server starts.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from outpace.errors import BadInput, one_line
from outpace.models.loading import load_tokenizer

TEXTS = ("What is 13 + 28?", " The answer\n\n\tis: 3.14 <end>", "naïve 東京 🙂", "def f(x_1):\n    return x_1**2")
"""Numbers, spaces, other scripts, code: where tokenizers differ first."""

LIMIT_S = 180.0
"""How long loading a tokenizer may take: one of a hub that does not answer would take for ever."""

TRUSTING = "--trust-remote-code"


async def tokens_of(model: str, trust_remote_code: bool) -> dict[str, list[int]]:
    """Texts, and the ids that they must become."""
    trusting = [TRUSTING] if trust_remote_code else []
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, model, *trusting,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            answer, complaint = await process.communicate()
    except TimeoutError:
        raise BadInput(f"model.path {model}: its tokenizer was not loaded within {LIMIT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise BadInput(f"model.path {model}: no usable tokenizer: {one_line(last)}")
    found: dict[str, list[int]] = json.loads(answer)
    return found


def main(model: str, trust_remote_code: bool) -> None:
    tokenizer: Any = load_tokenizer(model, trust_remote_code=trust_remote_code)
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in TEXTS}
    print(json.dumps(ids))


if __name__ == "__main__":
    main(sys.argv[1], TRUSTING in sys.argv)
