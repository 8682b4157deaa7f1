"""A chat server in a process of its own, with a real model behind it: python chat_server.py CHECKPOINT

It prints its port. It answers /chat/completions with what `Policy` samples, and with the log-probabilities of the first
token where they are asked for, as vLLM and llama.cpp do.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import torch

from qlass.chat import State
from qlass.driver import Sample
from qlass.policy import Policy

torch.set_num_threads(1)


@torch.inference_mode()
def likeliest(policy: Policy, state: State, n: int) -> list[dict]:
    ids = torch.tensor([policy.chat.prompt(state)])
    top = policy.model(input_ids=ids).logits[0, -1].float().log_softmax(-1).topk(n)
    words = policy.chat.tokenizer.convert_ids_to_tokens(top.indices.tolist())
    return [{"token": word, "logprob": logp} for word, logp in zip(words, top.values.tolist(), strict=True)]


def main(folder: str) -> None:
    policy = Policy.load(Path(folder))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def reply(self, record):
            data = json.dumps(record).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.reply({"data": [{"id": folder}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state = State(tuple((m["role"], m["content"]) for m in body["messages"]))
            ((answer,),) = policy.sample([Sample(state, 1, ("chat", body.get("seed", 0)), body["temperature"])])
            choice = {"message": {"role": "assistant", "content": answer.text}}
            if body.get("logprobs"):
                top = likeliest(policy, state, min(body["top_logprobs"], len(policy.chat.tokenizer)))
                choice["logprobs"] = {"content": [{"top_logprobs": top}]}
            self.reply({"choices": [choice]})

    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
