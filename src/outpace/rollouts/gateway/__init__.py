"""Gateway: an OpenAI- and Anthropic-compatible HTTP server inside a rollout worker, for unmodified agents.

    agent ── HTTP ──▶ routes: authenticate, parse ──▶ exchange ──▶ the episode's client ──▶ engine
          ◀─ JSON or SSE ── API format ◀── completion, or its text while it grows ◀── engine.peek ──┘

| module | content |
|---|---|
| `server` | `Gateway`: opens and closes endpoints; HTTP routes, authentication, error responses |
| `sessions` | which agent may use which episode; in-flight requests |
| `protocol` | API-independent request and reply; how much of an unfinished answer can be streamed; server-sent events |
| `openai`, `anthropic` | requests, responses and stream events of each API |

aiohttp is imported only when the first endpoint is opened.
"""
