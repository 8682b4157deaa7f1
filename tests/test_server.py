"""Sampling and scoring on a server: against a fake one that fails, stalls and lies."""

import base64
import json
import math
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import save_agent, serving, settings_of, tiny_backbone, tiny_lm, word_chat

import q_search
from qlass import UserError
from qlass.batching import LogProb, Sample, Score
from qlass.messages import State
from qlass.outputs import meta_path, write_json
from qlass.policy import QUESTION, Policy, load_agent
from qlass.served import ServedPolicy, ServedQNet, Server
from qlass.settings import Sampling
from train_qnet import QNet

CHAT = word_chat(temperature=0.8)
STATE = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand at start")), "find the purse")
LENGTH = len(CHAT.prompt(STATE))


def request(n: int = 1, key: tuple = ("t", 0)) -> Sample:
    return Sample(STATE, n, key, 0.8)


def choice(text: str, end: str | None = "stop", read: int = LENGTH, written: int = 3, **more) -> dict:
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    reply = {"id": "x", "object": "text_completion", "created": 0, "model": "first", "usage": usage}
    return reply | {"choices": [{"index": 0, "text": text, "finish_reason": end} | more]}


def well(body: dict) -> dict:
    """A reply with which nothing is wrong."""
    return choice(f"Action: left {body.get('seed')}", read=len(body["prompt"]))


class Fake:
    """Answers by its script (functions of a body, statuses, replies), else `well`."""

    def __init__(self) -> None:
        self.script, self.seen, self.models = [], [], [{"id": "first"}]

    def answer(self, body: dict) -> tuple:
        self.seen.append(body)
        turn = self.script.pop(0) if self.script else well
        turn = turn(body) if callable(turn) else turn
        return (turn, {"error": {"message": "no"}}) if isinstance(turn, int) else (200, turn)


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """No test sleeps: the seconds between tries."""
    seconds = []
    monkeypatch.setattr("openai._base_client.time", SimpleNamespace(**vars(time) | {"sleep": seconds.append}))
    return seconds


@pytest.fixture
def fake():
    server = Fake()
    with serving(server.answer, server.models) as server.url:
        yield server


@pytest.fixture
def sft(tmp_path):
    return save_agent(tmp_path / "sft", temperature=0.8)


def texts(policy: ServedPolicy, *requests: Sample) -> list[str]:
    return [c.text for drawn in policy.sample(list(requests)) for c in drawn]


def test_a_candidate_is_one_completion_of_token_ids(fake, sft):
    policy = ServedPolicy(sft, Sampling(server=fake.url))
    (drawn,) = policy.sample([request(3)])
    assert len(fake.seen) == len(drawn) == 3 and policy.computed == 3 * (LENGTH + 3)
    assert all((c.tokens, math.isnan(c.logprob)) == (3, True) for c in drawn)
    first = [c.text for c in drawn]
    for body in fake.seen:
        assert f"Action: left {body.pop('seed')}" in first
        assert body == {
            **{"model": "first", "prompt": CHAT.prompt(STATE), "max_tokens": CHAT.rendering.max_new_tokens},
            **{"temperature": 0.8, "stop": [], "stop_token_ids": [CHAT.stop_id]},
        }
    assert len(set(first)) == 3 and texts(policy, request(2)) == first[:2]
    other = ServedPolicy(sft, Sampling(server=fake.url, seed=1))
    assert not {*texts(other, request(3)), *texts(policy, request(3, ("t", 1)))} & set(first)
    several = [request(1, ("t", i)) for i in range(24)]  # under way at once, and answered in order
    assert texts(policy, *several) == [texts(policy, r)[0] for r in several]


def logprobs_of(model: Any, body: dict) -> dict:
    """vLLM's reply to a question for the log-probabilities of a prompt."""
    first, *ids = body["prompt"]
    logp = Policy(model, CHAT).logits([first], ids).log_softmax(-1)
    rows = [{str(token): {"logprob": float(row[token])}} for row, token in zip(logp, ids, strict=True)]
    return choice("x", "length", 1 + len(ids), 1, prompt_logprobs=[None, *rows])


def test_the_log_probability_of_a_text_is_the_local_agents(fake, sft):
    local, policy = Policy(tiny_lm(CHAT), CHAT), ServedPolicy(sft, Sampling(server=fake.url))
    fake.script += [partial(logprobs_of, local.model)] * 3
    asked = [LogProb(STATE, ("Action: left", "Action: right")), LogProb(STATE, ("Action: walk",))]
    for mine, theirs in zip(policy.likelihoods(asked), local.likelihoods(asked), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(("seed", "told"), [(0, False), (1, True)])
def test_a_server_of_other_weights_than_the_checkpoints_is_told(fake, sft, seed, told):
    write_json(meta_path(sft), {"fingerprint": Policy(tiny_lm(CHAT), CHAT).likelihoods([QUESTION])[0]})
    fake.script += [partial(logprobs_of, tiny_lm(CHAT, seed))] * 2
    config, refused = settings_of(q_search, "--sft", str(sft), "--server", fake.url), ""
    try:
        load_agent(sft, config)
    except UserError as error:
        refused = str(error)
    assert ("has other weights than" in refused) == told


FAULTS = [  # no text may come from these
    choice("Action: left", read=3),  # a short context, or another model
    choice("", None),  # not finished
    404,
]


@pytest.mark.parametrize("reply", FAULTS)
def test_a_reply_that_is_none_stops_the_run(fake, sft, pauses, reply):
    policy = ServedPolicy(sft, Sampling(server=fake.url))
    fake.script += [reply]
    with pytest.raises(UserError, match=fake.url) as error:
        policy.sample([request()])
    assert len(fake.seen) == 1 and not pauses and "\n" not in str(error.value)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_is_waited_for(fake, sft, pauses, status):
    policy = ServedPolicy(sft, Sampling(server=fake.url))
    fake.script += [status] * 5
    assert len(texts(policy, request())) == 1 and len(fake.seen) == 6 and len(pauses) == 5


def test_an_agent_that_chooses_is_not_served(fake, tmp_path):
    sft = save_agent(tmp_path / "sft", candidates="valid")
    with pytest.raises(UserError, match="chooses by probabilities"):
        ServedPolicy(sft, Sampling(server=fake.url))
    assert Server(f"{fake.url}#second").model == "second"


def test_a_served_qnet_gives_the_local_values(fake, tmp_path):
    net = QNet(tiny_backbone(CHAT), CHAT, hidden=8).eval()
    (tmp_path / "qnet").mkdir()
    net.save_pretrained(tmp_path / "qnet")

    def values(body: dict, **lie) -> dict:
        with torch.inference_mode():
            numbers = [float(net(input_ids=torch.tensor([ids]))[0, -1]) for ids in body["input"]]
        floats = [base64.b64encode(np.array([value], "<f4").tobytes()).decode() for value in numbers]
        data = [{"object": "embedding", "index": i, "embedding": text} for i, text in enumerate(floats)][::-1]
        read = sum(map(len, body["input"]))
        usage = {"prompt_tokens": read, "total_tokens": read} | lie
        return {"object": "list", "data": data, "model": body["model"], "usage": usage}

    served = ServedQNet(f"{fake.url}#{tmp_path / 'qnet'}", Sampling())
    siblings = Score(STATE, ("Action: left", "Action: right", "Thought: hm Action: left"))
    fake.script += [values, partial(values, prompt_tokens=7)]
    assert served.score([siblings])[0] == pytest.approx(net.score([siblings])[0], abs=1e-5)
    with pytest.raises(UserError, match="reads"):
        served.score([siblings])
    assert json.dumps(fake.seen[0]["input"])
