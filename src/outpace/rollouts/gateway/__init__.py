"""Gateway: an OpenAI- and Anthropic-compatible HTTP server inside a rollout worker, for unmodified agents.

    agent ── HTTP ──▶ http: authenticate, parse ──▶ exchange ──▶ the episode's client ──▶ engine
          ◀─ JSON or SSE ── API format ◀── completion, or its text while it grows ◀── engine.stream_tokens ──┘

| module | content |
|---|---|
| `server` | `Gateway`: opens and closes endpoints; sessions (one role of one episode) and in-flight requests |
| `http` | routes, authentication, error responses, server-sent events |
| `protocol` | API-independent request and reply; how much of an unfinished answer can be streamed |
| `openai`, `anthropic` | requests, responses and stream events of each API |

aiohttp is imported only when the first endpoint is opened.
"""
