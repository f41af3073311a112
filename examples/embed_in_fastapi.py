"""Embedding: a FastAPI application with the server's endpoints below /llm, and one of its own on the same engine.

python examples/embed_in_fastapi.py --port 8000
curl 'localhost:8000/complete?text=def%20fib(n):'
curl localhost:8000/llm/v1/completions -H 'content-type: application/json' -d '{"prompt": "def fib(n):"}'
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from swiftspec import LLM, AsyncEngine, EngineConfig, SamplingParams
from swiftspec.serve.http.app import create_app

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="swiftspec/demo/target")
parser.add_argument("--draft-model", default="swiftspec/demo/draft")
parser.add_argument("--port", type=int, default=8000)
args = parser.parse_args()
tokenizer = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncEngine(LLM(args.model, args.draft_model, EngineConfig(draft_steps=4))) as engine:
        app.state.engine = engine
        app.mount("/llm", create_app(engine))
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/complete")
async def complete(text: str) -> StreamingResponse:
    prompt, sampling = tokenizer.encode(text).ids, SamplingParams(temperature=0.0, max_tokens=48)

    async def pieces() -> AsyncIterator[str]:
        decoded = DecodeStream(skip_special_tokens=True)  # a character can consist of the tokens of several chunks
        async with aclosing(app.state.engine.stream(prompt, sampling)) as chunks:  # cancels if the client disconnects
            async for chunk in chunks:
                yield "".join(decoded.step(tokenizer, token) or "" for token in chunk.token_ids)

    return StreamingResponse(pieces(), media_type="text/plain")


uvicorn.run(app, port=args.port, log_level="warning")
