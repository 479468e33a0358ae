"""Which policy: loading models and tokenizers, rendering chats, the built-in starter."""
