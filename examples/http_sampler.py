"""A sampler in another process, over HTTP, and the engine that asks it.

Start it with `python -m examples.http_sampler MODEL --port 8001`, and train with `--plugin examples/http_sampler.py
--engine http --sampler_url http://127.0.0.1:8001`. It samples with transformers.
"""

import io
import sys
import urllib.request
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch

from common import console, distributed
from common.errors import UserError
from common.records import Output, Prompt, Request, Sampling
from data import load_processor
from policy.model import load_model
from policy.sharding import sampler_weights
from rollout import ENGINES, EngineEntry
from sampling.hf_engine import HFEngine


@dataclass
class Flags:
    sampler_url: str = "http://127.0.0.1:8001"
    """Address of the sampler of `--engine http`."""


def pack(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpack(body: bytes):
    return torch.load(io.BytesIO(body), weights_only=True)  # data only: a pickle could run code


class HTTPEngine:
    """Asks the sampler for completions. Its weights are those of the last sync."""

    stays_awake = True

    def __init__(self, flags, model, processor, device, dtype, limits, policy):
        self.url, self.dtype = flags.sampler_url, dtype
        if policy is None:  # an evaluation, which never syncs
            self.ask("weights", load_model(model, dtype).state_dict())

    def ask(self, path, value):
        try:
            with urllib.request.urlopen(f"{self.url}/{path}", pack(value)) as answer:
                return unpack(answer.read())
        except OSError as error:
            raise UserError(
                f"--sampler_url {self.url} does not answer ({error}): run python -m examples.http_sampler MODEL"
            ) from None

    def sync_weights(self, policy):
        weights = {name: weight.to("cpu", self.dtype, copy=True) for name, weight in sampler_weights(policy)}
        with distributed.shared_errors():
            if console.is_main():
                self.ask("weights", weights)

    def generate(self, requests, sampling):
        prompts = {id(each.prompt): each.prompt for each in requests}  # each once: completions share what is computed
        question = {
            "prompts": {key: vars(prompt) | {"images": []} for key, prompt in prompts.items()},
            "requests": [vars(each) | {"prompt": id(each.prompt)} for each in requests],
            "sampling": vars(sampling),
        }
        return [Output(**output) for output in self.ask("generate", question)]

    def sleep(self):
        pass

    def wake_up(self):
        pass


ENGINES["http"] = EngineEntry(HTTPEngine, "transformers over HTTP", needs_copy=False)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request, engine = unpack(self.rfile.read(int(self.headers["Content-Length"]))), self.server.engine
        answer = []
        if self.path == "/weights":
            engine.model.load_state_dict(request, strict=False)
        else:
            prompts = {key: Prompt(**fields) for key, fields in request["prompts"].items()}
            asked = [Request(**fields | {"prompt": prompts[fields["prompt"]]}) for fields in request["requests"]]
            answer = [vars(output) for output in engine.generate(asked, Sampling(**request["sampling"]))]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(pack(answer))

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    model, port = sys.argv[1], int(sys.argv[3])
    server = HTTPServer(("127.0.0.1", port), Handler)
    server.engine = HFEngine(load_model(model, torch.float32).eval(), load_processor(model, "count").tokenizer)
    server.serve_forever()
