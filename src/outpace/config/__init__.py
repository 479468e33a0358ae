"""Configuration: typed, strict settings. Importing this package does not load torch.

sections, algorithm, engines      settings, one class per section; `algorithm` also looks up the configured functions
load                              read files, command lines and dicts into a `Config`, and write it back as TOML
base                              base class of the sections; parse command-line text by type
other_libraries                   setting names of other libraries, for error messages
presets, defaults                 named presets, and defaults that depend on other settings
validation, algorithm_validation  reject invalid combinations, in one line that starts with the key to change
"""

from __future__ import annotations

from outpace.config.sections import STARTER, STARTER_AGENT, Config, LearnerConfig

__all__ = ["STARTER", "STARTER_AGENT", "Config", "LearnerConfig"]
