"""Response formats: tool calls, reasoning, log-probabilities, server-sent events, errors."""
