"""Sampling and scoring on a server: against a fake one that fails, stalls and lies."""

import base64
import math
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import save_agent, serving, settings_of, tiny_backbone, tiny_lm, word_chat

import q_search
from qlass import UserError
from qlass.agent import load_agent
from qlass.batching import LogProb, Sample, Score
from qlass.files import read_jsonl
from qlass.messages import State
from qlass.models import save_checkpoint
from qlass.policy import Policy
from qlass.runs import meta_of
from qlass.served_qnet import ServedQNet
from qlass.server import ALL, TRIES, ChatPolicy, Server, ServerPolicy
from train_qnet import QNet

CHAT = word_chat(temperature=0.8)
STATE = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand at start")), "find the purse")
LENGTH = len(CHAT.prompt(STATE))


def request(n: int = 1, key: tuple = ("t", 0), temperature: float = 0.8) -> Sample:
    return Sample(STATE, n, key, temperature)


def choice(text: object, end: str | None = "stop", read: object = None, written: int | None = None, **more) -> dict:
    usage = {"prompt_tokens": read, "completion_tokens": written}
    return {"choices": [{"text": text, "finish_reason": end}], "usage": usage} | more


class Fake:
    """Answers by its script (functions of a body, statuses, (status, reply, headers), replies), then completions."""

    def __init__(self) -> None:
        self.script, self.seen, self.models = [], [], [{"id": "first"}]

    def answer(self, body: dict) -> tuple:
        self.seen.append(body)
        if not self.script or body.get("temperature") == 2:  # of which the test of seeds are
            return 200, choice(f"Action: left {body.get('seed')}", read=len(body["prompt"]), written=3)
        turn = self.script.pop(0)
        turn = turn(body) if callable(turn) else turn
        if isinstance(turn, int):
            return turn, {"error": {"message": "no"}}
        return turn if isinstance(turn, tuple) else (200, turn)

    def sampled(self) -> list[dict]:
        return [body for body in self.seen if body.get("temperature") != 2]


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """No test sleeps: the seconds between tries. And a proxy that no local server may be asked through."""
    seconds = []
    monkeypatch.setattr("openai._base_client.time", SimpleNamespace(**vars(time) | {"sleep": seconds.append}))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    return seconds


@pytest.fixture
def fake():
    server = Fake()
    with serving(server.answer, server.models) as server.url:
        yield server


def texts(policy: ServerPolicy, *requests: Sample) -> list[str]:
    return [c.text for drawn in policy.sample(list(requests)) for c in drawn]


def test_a_candidate_is_one_completion_of_token_ids(fake):
    policy = ServerPolicy(fake.url, CHAT)
    (drawn,) = policy.sample([request(3)])
    assert len(fake.sampled()) == len(drawn) == 3 and policy.computed == 3 * (LENGTH + 3)
    assert all((c.tokens, math.isnan(c.logprob)) == (3, True) for c in drawn)
    first = [c.text for c in drawn]
    for body in fake.sampled():
        assert f"Action: left {body.pop('seed')}" in first
        assert body == {
            **{"model": "first", "prompt": CHAT.prompt(STATE), "max_tokens": CHAT.rendering.max_new_tokens},
            **{"temperature": 0.8, "top_p": 1.0, "top_k": ALL, "stop": ["<end>"], "stop_token_ids": [CHAT.stop_id]},
            **{"min_p": 0, "repetition_penalty": 1, "repeat_penalty": 1},  # what a server might do by default
        }
    assert len(set(first)) == 3
    assert texts(ServerPolicy(fake.url, CHAT), request(3)) == first and texts(policy, request(2)) == first[:2]
    assert not {*texts(ServerPolicy(fake.url, CHAT, 1), request(3)), *texts(policy, request(3, ("t", 1)))} & set(first)
    several = [request(1, ("t", i)) for i in range(24)]  # under way at once, and answered in order
    assert texts(policy, *several) == [texts(policy, r)[0] for r in several]


def test_the_log_probability_of_a_text_is_the_local_agents(fake):
    local, policy = Policy(tiny_lm(CHAT), CHAT), ServerPolicy(fake.url, CHAT)

    def told(body: dict) -> dict:
        first, *ids = body["prompt"]
        logp = local.logits([first], ids).log_softmax(-1)
        reply = choice("x", "length", 1 + len(ids), 1)
        rows = [{str(token): {"logprob": float(row[token])}} for row, token in zip(logp, ids, strict=True)]
        reply["choices"][0]["prompt_logprobs"] = [None, *rows]
        return reply

    fake.script += [told] * 3
    asked = [LogProb(STATE, ("Action: left", "Action: right")), LogProb(STATE, ("Action: walk",))]
    for mine, theirs in zip(policy.likelihoods(asked), local.likelihoods(asked), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert policy.computed > 3 * LENGTH


def test_sampling_settings_reach_the_server(fake):
    stops = ("Observation:", "Task:", "User:", "Thought:", "\n\n")
    policy = ServerPolicy(fake.url, word_chat(top_p=0.9, top_k=5, stop=stops, max_new_tokens=7))
    for end in ("", " <end> more", "\nThought: more", "\n\nAction: right"):  # a server takes four stop texts
        fake.script += [choice("Action: left" + end)]
        assert texts(policy, request()) == ["Action: left"]
    body = fake.sampled()[0]
    assert (body["top_p"], body["top_k"], body["max_tokens"]) == (0.9, 5, 7)
    assert body["stop"] == ["<end>", *stops[:3]]


def said(message: dict, end: str = "stop", **more) -> dict:
    return {"choices": [{"message": message, "finish_reason": end}]} | more


def entry(index: int, *values: float) -> dict:
    return {"index": index, "embedding": base64.b64encode(np.array(values, "<f4").tobytes()).decode()}


def told(body: dict, **lie) -> dict:
    with torch.inference_mode():
        values = [float(NET(input_ids=torch.tensor([ids]))[0, -1]) for ids in body["input"]]
    data = [entry(i, value) for i, value in enumerate(values)][::-1]
    return {"data": data, "model": body["model"], "usage": {"prompt_tokens": sum(map(len, body["input"]))}} | lie


NET = QNet(tiny_backbone(CHAT), CHAT, hidden=8).eval()
SIBLINGS = Score(STATE, ("Action: left", "Action: right", "Thought: hm Action: left"))
QUESTION = [("user", "How good is it to walk to the left here? " * 40)]  # some 400 tokens
ASK = {
    "sample": lambda url: ServerPolicy(url, CHAT).sample([request()]),
    "chat": lambda url: Server(url).chat(QUESTION),
    "score": lambda url: ServedQNet(url, CHAT).score([SIBLINGS]),
}
FAULTS = [  # no number may come from these: the message
    ("sample", choice("Action: left", read=3), f"reads 3 tokens of {LENGTH}: a short context or another model"),
    ("sample", choice("", "length", written=12), "has room for 12 of 12 tokens"),
    ("sample", {"error": {"message": "overloaded"}}, "answers .*overloaded"),
    ("sample", b"<html>\nsign in</html>", "its reply: not valid JSON"),
    ("sample", 404, "Error code: 404.*; is it a server's URL, with /v1"),
    ("sample", (400, {"error": {"message": "I do\nnot know top_k"}}), ".*I do not know top_k"),
    ("chat", said({"content": "3"}, usage={"prompt_tokens": 100}), "reads 100 tokens"),
    ("chat", said({"content": "", "tool_calls": []}, "tool_calls"), "gives up a reply.*tool_calls"),
    ("score", partial(told, usage={"prompt_tokens": 7}), "reads 7 tokens of [0-9]+: a short context"),
    ("score", partial(told, model="first-lora"), "answers by first-lora, not by first"),
    ("score", partial(told, data=[entry(i, 1, 2) for i in range(3)]), "answers .*index"),
    ("score", partial(told, data=[entry(0, 1)]), "answers .*index"),
    ("score", partial(told, data=[entry(i, math.inf) for i in range(3)]), "QNet's values are not finite"),
]


@pytest.mark.parametrize(("kind", "reply", "problem"), FAULTS)
def test_a_reply_that_is_none_stops_the_run(fake, pauses, kind, reply, problem):
    fake.script += [reply]
    with pytest.raises(UserError, match=problem) as error:
        ASK[kind](fake.url)
    assert len(fake.sampled()) == 1 and not pauses and "\n" not in str(error.value)


GOOD = [
    choice("Action: a", "length", written=12),
    choice("Action: a", None, LENGTH),
    *(choice("Action: a", "eos_token", model=m) for m in ("/home/first@main", "first-2024-08-06", "first:latest")),
    {"choices": [{"text": "Action: a", "finish_reason": "length"}], "model": None, "usage": None},
    choice("Action: a", usage={"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": LENGTH - 3}}),
]


@pytest.mark.parametrize("reply", GOOD)
def test_a_reply_that_is_good(fake, reply):
    policy = ServerPolicy(fake.url, CHAT)
    fake.script += [reply, choice("")]
    assert texts(policy, request()) == ["Action: a"] and texts(policy, request()) == [""]  # the end of the turn at once


def test_a_chat_model_answers_what_a_policy_does(fake):
    policy = ChatPolicy(fake.url, "--judge", 7, seed=3)
    fake.script += [said({"content": text}) for text in "abc"]
    drawn = policy.sample([request(2), request(1, ("u", 0), 0.0)])
    assert [len(texts) for texts in drawn] == [2, 1] and sorted(c.text for texts in drawn for c in texts) == [
        "a",
        "b",
        "c",
    ]
    bodies = fake.sampled()
    assert [body["messages"] for body in bodies] == [STATE.dump()] * 3 and {body["max_tokens"] for body in bodies} == {
        7
    }
    assert len({body["seed"] for body in bodies}) == 3 and sum(body["temperature"] for body in bodies) == 1.6
    tokens = [
        {"token": token, "logprob": logp} for token, logp in ((" B", -1.0), ("x", -1.5), ("A", -2.0), ("B", -9.0))
    ]
    fake.script += [said({"content": "B"}), said({"content": "B"})]
    fake.script[0]["choices"][0]["logprobs"] = {"content": [{"top_logprobs": tokens}]}
    letters = Sample(STATE, 1, (), 1.0, ("A", "B", "C"))
    assert policy.valid_logprobs([letters])[0].tolist() == [-2.0, -1.0, -math.inf]
    with pytest.raises(UserError, match="tells no log-probabilities"):
        policy.valid_logprobs([letters])


def test_which_model_is_meant(fake):
    several = [{"id": "base"}, {"id": "adapter"}]
    for models, says in ((["first"], "answers"), ([], "serves no model"), (several, "serves base, adapter: name one")):
        fake.models[:] = models
        with pytest.raises(UserError, match=f"{fake.url}: {says}"):
            ServerPolicy(fake.url, CHAT)
    policy = ServerPolicy(f"{fake.url}#adapter", CHAT)
    assert len(texts(policy, request())) == 1 and policy.server.model == fake.sampled()[0]["model"] == "adapter"


@pytest.mark.parametrize("failure", [429, 503, 0])
def test_a_server_that_is_busy_or_away_is_waited_for(fake, failure, pauses, capsys):
    policy = ServerPolicy(fake.url, CHAT)
    first = texts(policy, request())
    fake.script += [failure] * 8
    assert texts(policy, request()) == first and len(pauses) == 8
    fake.script += [(429, {}, {"Retry-After": 100})]
    assert texts(policy, request()) == first and pauses.pop() == 100
    fake.script += [failure] * (TRIES + 1)
    with pytest.raises(UserError, match=str(failure or "Connection error.; is it a server's URL")) as error:
        policy.sample([request()])
    assert not fake.script and 400 < sum(pauses[8:]) < 660 and "\n" not in str(error.value)
    assert capsys.readouterr().err == f"warning: --server {fake.url} is busy or away; retried for 10 minutes\n"


@pytest.mark.parametrize(("text", "told"), [("Action: left", True), ("Action: left {seed}", False)])
def test_a_server_whose_seeds_do_nothing_is_told_of(capsys, text, told):
    with serving(lambda body: (200, choice(text.format(**body) if body["temperature"] == 2 else "left"))) as url:
        assert texts(ServerPolicy(url, CHAT), request(4)) == ["left"] * 4  # of which an agent may be sure
    assert ("ignores seeds" in capsys.readouterr().err) == told


def test_ctrl_c_stops_at_once(fake):
    """Also where a reply never comes and others wait."""
    end = threading.Event()

    def stall(body):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        end.wait(20)
        return 503

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
    policy = ServerPolicy(fake.url, CHAT)
    fake.script += [503, 503, stall]
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        policy.sample([request(4)])
    assert time.monotonic() - start < 5
    end.set()
    signal.signal(signal.SIGINT, before)


def test_a_server_scores_as_the_local_qnet_and_siblings_in_one_call(fake):
    asked = [SIBLINGS, Score(STATE.then("Action: left", "you stand"), SIBLINGS.actions[:1])]
    fake.script += [told, 503, told]
    for mine, local in zip(ServedQNet(fake.url, CHAT).score(asked), NET.score(asked), strict=True):
        assert mine == pytest.approx(local, abs=1e-6)
    assert sorted(len(body["input"]) for body in fake.seen) in ([1, 1, 3], [1, 3, 3])


def test_a_search_by_a_served_qnet_is_the_local_one_and_its_recipe_names_the_model(fake, fake_world, tmp_path):
    save_agent(tmp_path / "sft")
    (tmp_path / "qnet").mkdir()
    NET.save_pretrained(tmp_path / "qnet")
    fake.script += [told] * 99

    def search(qnet: object, out: str) -> list[dict]:
        flags = ["--skip", "0", "--limit", "3", "--qnet"]
        argv = ["--run", str(tmp_path), "--out", str(tmp_path / out), *flags, str(qnet)]
        q_search.main(argv)
        return [{**line, "seconds": 0} for line in read_jsonl(tmp_path / out)]

    assert search(fake.url, "served.jsonl") == search(tmp_path / "qnet", "local.jsonl") and fake.seen
    assert meta_of(tmp_path / "served.jsonl")["recipe"]["qnet_model"] == "first"
    for other, out in (
        (f"{fake.url}#second", "served.jsonl"),  # other weights wrote it
        (tmp_path / "qnet", "served.jsonl"),
        (fake.url, "local.jsonl"),
    ):
        with pytest.raises(UserError, match="begun with --qnet"):
            search(other, out)


def test_nobody_there_and_what_is_asked_of_no_server(capsys):
    with pytest.raises(UserError, match=r"--server http://127.0.0.1:9/v1: Connection error.; is it a server's URL"):
        Server("http://127.0.0.1:9/v1")
    assert capsys.readouterr().err.count("busy or away") == 1
    with pytest.raises(UserError, match="--candidates free"):
        ServerPolicy("http://a/v1", word_chat(candidates="valid"))


def test_flags_change_what_the_checkpoint_says(tmp_path, fake):
    save_checkpoint(tiny_lm(CHAT), CHAT, tmp_path)
    flags = f"--sft {tmp_path} --max-new-tokens 5 --top-p .5 --top-k 3 --stop Observation: --truncate oldest"
    r = load_agent(tmp_path, settings_of(q_search, *flags.split())).chat.rendering
    assert (r.max_new_tokens, r.top_p, r.top_k, r.stop, r.truncate) == (5, 0.5, 3, ("Observation:",), "oldest")
    flags = ["--sft", str(tmp_path), "--server", f"{fake.url}#second", "--top-k", "3"]
    there = load_agent(tmp_path, settings_of(q_search, *flags))
    assert (there.server.model, there.chat.rendering.top_k, there.chat.context) == ("second", 3, 4096)
    flags += ["--env", "frozenlake", "--run", str(tmp_path / "run"), "--limit", "1", "--method", "likeliest"]
    with pytest.raises(UserError, match="tells no log-probabilities: no --method likeliest"):
        q_search.main(flags)
