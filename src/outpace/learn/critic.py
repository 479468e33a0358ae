"""The value head: one linear layer on the hidden state that predicts a token, saying what the rest will return."""

from __future__ import annotations

from torch import Tensor, nn


class ValueHead(nn.Linear):
    """Starts at zero, so that before anything is learned gae is the discounted return.

    Unless `shared`, the head reads the hidden states and leaves them alone."""

    def __init__(self, width: int, shared: bool) -> None:
        super().__init__(width, 1)
        self._shared = shared
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        states_ND = hidden_ND if self._shared else hidden_ND.detach()
        return super().forward(states_ND.to(self.weight.dtype)).squeeze(-1)
