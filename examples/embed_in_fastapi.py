"""Embedding: a FastAPI application with the server's endpoints below /llm, and one of its own on the same engine.

python examples/embed_in_fastapi.py --port 8000
curl 'localhost:8000/complete?text=def%20fib(n):'
curl localhost:8000/llm/v1/completions -H 'content-type: application/json' -d '{"prompt": "def fib(n):"}'
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from swiftspec import AsyncEngine, SamplingParams
from swiftspec.serve.app import create_app

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="demo")
parser.add_argument("--draft-model")
parser.add_argument("--port", type=int, default=8000)
args = parser.parse_args()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncEngine(args.model, args.draft_model) as engine:
        app.state.engine = engine
        app.mount("/llm", create_app(engine))
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/complete")
async def complete(text: str) -> StreamingResponse:
    async def pieces() -> AsyncIterator[str]:
        sampling = SamplingParams(temperature=0.0, max_tokens=48)
        async with aclosing(app.state.engine.generate(text, sampling)) as chunks:  # cancels if the client disconnects
            async for chunk in chunks:
                yield chunk.text

    return StreamingResponse(pieces(), media_type="text/plain")


uvicorn.run(app, port=args.port, log_level="warning")
