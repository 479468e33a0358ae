"""Tools: functions, MCP servers and environments that the model can call."""
