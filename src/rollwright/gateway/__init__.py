"""The gateway: the HTTP endpoint the CLI calls, backed by the engine, recording every turn token for token."""
