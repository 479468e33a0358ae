"""The reward of the run: it varies between random answers."""


def length(completions: list[str], **columns: object) -> list[float]:
    return [len(text) % 5 / 4 for text in completions]
