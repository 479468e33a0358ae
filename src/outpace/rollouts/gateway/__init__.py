"""Gateway: an OpenAI- and Anthropic-compatible HTTP server inside a rollout worker, for unmodified agents.

    agent ── HTTP ──▶ http: authenticate, parse ──▶ exchange ──▶ the episode's client ──▶ engine
          ◀─ JSON or SSE ── API format ◀── completion, or its text while it grows ◀── engine.stream_tokens ──┘

aiohttp is imported only when the first endpoint is opened.
"""
