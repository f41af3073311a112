"""Runtime of one request: drafters and verifiers, KV cache, prefix cache, and the executors of forwards."""
