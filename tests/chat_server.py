"""A chat server in a process of its own, with a real model behind it: python chat_server.py CHECKPOINT

It prints its port. It answers /chat/completions with what `Policy` samples, and with the log-probabilities of the first
token where they are asked for, as vLLM and llama.cpp do.
"""

import sys
import threading
from pathlib import Path

import torch
from json_server import json_server

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

    def answer(body: dict) -> tuple[int, dict]:
        state = State(tuple((m["role"], m["content"]) for m in body["messages"]))
        with one_at_a_time:
            ((said,),) = policy.sample([Sample(state, 1, ("chat", body.get("seed", 0)), body["temperature"])])
        choice = {"message": {"role": "assistant", "content": said.text}}
        if body.get("logprobs"):
            top = likeliest(policy, state, min(body["top_logprobs"], len(policy.chat.tokenizer)))
            choice["logprobs"] = {"content": [{"top_logprobs": top}]}
        return 200, {"choices": [choice]}

    server, one_at_a_time = json_server(answer, (folder,)), threading.Lock()
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
