"""MERGED"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from outpace.errors import BadInput, one_line
from outpace.models.loading import load_tokenizer

TEXTS = ("What is 13 + 28?", " The answer\n\n\tis: 3.14 <end>", "naïve 東京 🙂", "def f(x_1):\n    return x_1**2")
"""Numbers, whitespace, other scripts, code: the texts on which tokenizers differ first."""

LIMIT_S = 180.0
"""Timeout for loading a tokenizer: it would hang forever on an unresponsive Hub."""

TRUST_FLAG = "--trust-remote-code"


async def tokens_of(model: str, trust_remote_code: bool) -> dict[str, list[int]]:
    """Texts and their token ids by the run's tokenizer."""
    trust_arguments = [TRUST_FLAG] if trust_remote_code else []
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, model, *trust_arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            answer, errors = await process.communicate()
    except TimeoutError:
        raise BadInput(f"model.path {model}: the tokenizer did not load within {LIMIT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise BadInput(f"model.path {model}: no usable tokenizer: {one_line(last)}")
    found: dict[str, list[int]] = json.loads(answer)
    return found


def main(model: str, trust_remote_code: bool) -> None:
    tokenizer: Any = load_tokenizer(model, trust_remote_code=trust_remote_code)
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in TEXTS}
    print(json.dumps(ids))


if __name__ == "__main__":
    main(sys.argv[1], TRUST_FLAG in sys.argv)
