"""MERGED"""

from __future__ import annotations

from torch import Tensor, nn


class ValueHead(nn.Linear):
    """Value head: one linear layer from the hidden state that predicts a token to the expected return.

    Initialized to zero, so GAE starts as the discounted return. Unless `shared`, no gradient flows into the hidden
    states."""

    def __init__(self, width: int, shared: bool) -> None:
        super().__init__(width, 1)
        self._shared = shared
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        states_ND = hidden_ND if self._shared else hidden_ND.detach()
        return super().forward(states_ND.to(self.weight.dtype)).squeeze(-1)
