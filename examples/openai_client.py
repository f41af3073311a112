"""The openai client against a running server.

swiftspec serve --port 8000
python examples/openai_client.py --base-url http://localhost:8000/v1
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--base-url", default="http://localhost:8000/v1")
parser.add_argument("--api-key", default="none")
args = parser.parse_args()

client = OpenAI(base_url=args.base_url, api_key=args.api_key)
model = client.models.list().data[0].id
stream = client.completions.create(model=model, prompt="def fib(n):", max_tokens=40, temperature=0, stream=True)
for event in stream:
    print(event.choices[0].text, end="", flush=True)
print()
