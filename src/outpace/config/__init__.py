"""Every setting, typed and strict; importing it loads no torch.

sections, algorithm     what can be set
loading, files          from files, command lines and dicts, and back
text_values             text as a value of a type
equivalents             names of other libraries' settings, for error messages
presets, dependent      recipes, and defaults that follow from other settings
rules, algorithm_rules  what is refused, in one line that starts with the key to change
methods                 the functions that a config names, with the settings each takes
"""

from __future__ import annotations

from outpace.config.sections import STARTER, STARTER_AGENT, Config, LearnerConfig

__all__ = ["STARTER", "STARTER_AGENT", "Config", "LearnerConfig"]
