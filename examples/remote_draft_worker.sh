#!/usr/bin/env bash
# The draft as a gRPC worker, here on the same machine; the target runs in the client's process.
# On another machine the worker needs --tls-cert, --tls-key and a token: docs/guides/network.md.
set -euo pipefail

PYTHON=${PYTHON:-python}
PORT=${PORT:-7071}

"$PYTHON" -m swiftspec worker draft --listen "127.0.0.1:$PORT" &
worker=$!
trap 'kill "$worker" 2>/dev/null; wait "$worker" 2>/dev/null || true' EXIT

# The client starts without the draft if the worker is still loading, and the draft joins the running request.
"$PYTHON" -m swiftspec generate --model swiftspec/demo/target --draft-url "127.0.0.1:$PORT" \
  --prompt "def fib(n):" --raw --max-tokens 40 --temperature 0
