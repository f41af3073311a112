"""KV events: which prefixes the server can reuse, published over ZeroMQ in vLLM's format for prefix-aware routers."""
