"""An OpenAI-compatible server inside a rollout worker, for agents that know nothing of outpace.

    agent ── HTTP ──▶ routes: who is it, what does it want ──▶ exchange ──▶ the episode's client ──▶ engine
          ◀─ JSON or events ── one form per protocol ◀── answer, or its text as it grows ◀── peek ──┘

| module | what it answers |
|---|---|
| `server` | the gateway as a worker holds it: open an endpoint, close it with its episode |
| `sessions` | who may talk to which episode |
| `app`, `routes` | HTTP: whom to let in, what to read, how failures look |
| `wanted` | a request and its reply, whatever the protocol |
| `openai_form`, `openai_replies`, `anthropic_form` | the shapes of the protocols, in and out |
| `exchange`, `reveal` | one request under way, and how much of its text can be shown already |
| `sse` | a stream of events |

`app`, `routes` and `sse` load aiohttp; a worker that opens no endpoint does not.
"""
