"""Sampling and scoring on a server: against a fake one that fails, stalls and lies."""

import base64
import itertools
import json
import math
import re
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import chat_tokenizer, dump, save_agent, serving, settings_of, tiny_backbone, tiny_lm, word_chat

import bellman
import build_trees
import q_search
import reporting.__main__ as report
from qlass import Refused, UserError
from qlass.agent import load_agent
from qlass.batching import LogProb, Sample, Score, refusal_in
from qlass.chat import Chat, Rendering
from qlass.config import is_url
from qlass.files import read_jsonl, sha256
from qlass.messages import State
from qlass.models import save_checkpoint
from qlass.optional.foreign import fingerprint
from qlass.optional.served_policy import ALL, OPTIONAL, ChatPolicy, ServerPolicy
from qlass.optional.served_qnet import ServedQNet
from qlass.optional.server import HELLO, TRIES, Server
from qlass.policy import Policy
from qlass.runs import meta_of, meta_path
from train_qnet import QNet

CHAT = word_chat(temperature=0.8)
STATE = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand at start")), "find the purse")
LENGTH = len(CHAT.prompt(STATE))


def request(n: int = 1, key: tuple = ("t", 0), temperature: float = 0.8) -> Sample:
    return Sample(STATE, n, key, temperature)


def choice(text: object, end: str | None = "stop", read: object = None, written: int | None = None, **more) -> dict:
    usage = {"prompt_tokens": read, "completion_tokens": written}
    return {"choices": [{"text": text, "finish_reason": end}], "usage": usage} | more


def is_first(body: dict) -> bool:
    """Is this one of the questions by which a server is tried out?"""
    return body.get("temperature") == 2 or HELLO[1] in [turn["content"] for turn in body.get("messages", ())]


def well(body: dict) -> dict:
    """A reply with which nothing is wrong."""
    if "messages" in body:
        return said({"content": "yes"})
    return choice(f"Action: left {body.get('seed')}", read=len(body["prompt"]), written=3)


class Fake:
    """Answers by its script (functions of a body, statuses, (status, reply, headers), replies), else `well`.

    A first question is none of the script: `first` answers it, a function or a status.
    """

    def __init__(self) -> None:
        self.script, self.seen, self.models, self.first = [], [], [{"id": "first"}], well

    def answer(self, body: dict) -> tuple:
        self.seen.append(body)
        turn = self.first if is_first(body) else self.script.pop(0) if self.script else well
        turn = turn(body) if callable(turn) else turn
        if isinstance(turn, int):
            return turn, {"error": {"message": "no"}}
        return turn if isinstance(turn, tuple) else (200, turn)

    def sampled(self) -> list[dict]:
        return [body for body in self.seen if not is_first(body)]


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


def logprobs_of(model: Any, body: dict) -> dict:
    """vLLM's reply to a question for the log-probabilities of a prompt."""
    first, *ids = body["prompt"]
    logp = Policy(model, CHAT).logits([first], ids).log_softmax(-1)
    reply = choice("x", "length", 1 + len(ids), 1)
    rows = [{str(token): {"logprob": float(row[token])}} for row, token in zip(logp, ids, strict=True)]
    reply["choices"][0]["prompt_logprobs"] = [None, *rows]
    return reply


def test_the_log_probability_of_a_text_is_the_local_agents(fake):
    local, policy = Policy(tiny_lm(CHAT), CHAT), ServerPolicy(fake.url, CHAT)
    fake.script += [partial(logprobs_of, local.model)] * 3
    asked = [LogProb(STATE, ("Action: left", "Action: right")), LogProb(STATE, ("Action: walk",))]
    for mine, theirs in zip(policy.likelihoods(asked), local.likelihoods(asked), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert policy.computed > 3 * LENGTH
    for silent in (choice("x", "length", written=1), 400):  # a strict server knows no such field
        fake.script += [silent]
        with pytest.raises(UserError, match="tells no log-probabilities: no --method likeliest"):
            policy.likelihoods(asked[1:])


OTHER_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
WEIGHTS = [  # the model that a server has, and what is said of it
    (partial(tiny_lm, CHAT), ""),
    (partial(tiny_lm, CHAT, 1), "error: .*has other weights.*RUN/sft"),
    (partial(tiny_lm, CHAT, **OTHER_ROPE), "error: .*has other weights.*RUN/sft"),
    (None, "warning: .*whether it has these weights is not known"),
]


@pytest.mark.parametrize(("model", "problem"), WEIGHTS)
def test_a_server_of_other_weights_than_the_checkpoints_is_told(fake, tmp_path, capsys, model, problem):
    save_agent(tmp_path / "sft")
    mark = fingerprint(tiny_lm(CHAT), CHAT)
    meta_path(tmp_path / "sft").write_text(dump([{"fingerprint": mark}]))
    fake.script += [partial(logprobs_of, model())] * 4 if model else [400] * 4
    config = settings_of(q_search, "--sft", str(tmp_path / "sft"), "--server", fake.url)
    said = ""
    try:
        assert load_agent(tmp_path / "sft", config).computed == 0
    except UserError as error:
        said = f"error: {error}"
    said += "".join(re.findall("warning:.*", capsys.readouterr().err))
    assert re.match(problem, said) and bool(problem) == bool(said)


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


def told(body: dict, net: Any = None, **lie) -> dict:
    with torch.inference_mode():
        values = [float((net or NET)(input_ids=torch.tensor([ids]))[0, -1]) for ids in body["input"]]
    data = [entry(i, value) for i, value in enumerate(values)][::-1]
    return {"data": data, "model": body["model"], "usage": {"prompt_tokens": sum(map(len, body["input"]))}} | lie


NET = QNet(tiny_backbone(CHAT), CHAT, hidden=8).eval()
SIBLINGS = Score(STATE, ("Action: left", "Action: right", "Thought: hm Action: left"))
QUESTION = [("user", "How good is it to walk to the left here? " * 40)]  # some 400 tokens
ASK = {
    "sample": lambda url: ServerPolicy(url, CHAT).sample([request()]),
    "chat": lambda url: Server(url).chat(QUESTION),
    "score": lambda url: ServedQNet(Server(url, "--qnet"), CHAT).score([SIBLINGS]),
}
FAULTS = [  # no number may come from these: the message
    ("sample", choice("Action: left", read=3), f"reads 3 tokens of {LENGTH}: a short context or another model"),
    ("sample", choice("", "length", written=12), "has room for 12 of 12 tokens"),
    ("sample", {"error": {"message": "overloaded"}}, "answers .*overloaded"),
    ("sample", b"<html>\nsign in</html>", "its reply: not valid JSON"),
    ("sample", 404, "Error code: 404 - no$"),
    ("sample", 501, "Error code: 501 - no$"),
    ("sample", (429, {"error": {"code": "insufficient_quota", "message": "pay\nus"}}), "Error code: 429 - pay us"),
    ("chat", said({"content": "3"}, usage={"prompt_tokens": 100}), "reads 100 tokens"),
    ("chat", said({"content": "", "tool_calls": []}, "tool_calls"), "gives up a reply.*tool_calls"),
    ("score", partial(told, usage={"prompt_tokens": 7}), "reads 7 tokens of [0-9]+: a short context"),
    ("score", partial(told, data=[entry(i, 1, 2) for i in range(3)]), "gives 2 numbers for a text, where a QNet"),
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
    choice("Action: a", "eos_token"),
    {"choices": [{"text": "Action: a", "finish_reason": "length"}], "model": None, "usage": None},
    choice("Action: a", usage={"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": LENGTH - 3}}),
]


@pytest.mark.parametrize("reply", GOOD)
def test_a_reply_that_is_good(fake, reply):
    policy = ServerPolicy(fake.url, CHAT)
    fake.script += [reply, choice("")]
    assert texts(policy, request()) == ["Action: a"] and texts(policy, request()) == [""]  # the end of the turn at once


@pytest.mark.parametrize(
    ("said", "read"),
    [
        (r"left \ud83d", "left \ufffd"),  # cut within a character
        (r"\uDE00 left\uD83D\ud83d\ude00", "\ufffd left\ufffd\N{GRINNING FACE}"),
        (r"\\ud83d \u00e9 \"", '\\ud83d \u00e9 "'),
    ],
)
def test_half_a_character_of_a_reply_is_replaced(fake, said, read):
    fake.script += [json.dumps(choice("SAID")).replace("SAID", said).encode()]
    (text,) = texts(ServerPolicy(fake.url, CHAT), request())
    assert text.encode().decode() == read


def test_a_chat_model_answers_what_a_policy_does(fake):
    policy = ChatPolicy(fake.url, "--judge", 7, seed=3)
    fake.script += [said({"content": text}) for text in "abc"]
    (a, b), (c,) = policy.sample([request(2), request(1, ("u", 0), 0.0)])
    assert {a.text, b.text, c.text} == set("abc")
    bodies = fake.sampled()
    assert all((body["messages"], body["max_tokens"]) == (STATE.dump(), 7) for body in bodies)
    assert len({body["seed"] for body in bodies}) == 3 and sum(body["temperature"] for body in bodies) == 1.6
    likely = {" B": -1.0, "x": -1.5, "A": -2.0, "B": -9.0}
    tokens = [{"token": token, "logprob": logp} for token, logp in likely.items()]
    fake.script += [said({"content": "B"}), said({"content": "B"})]
    fake.script[0]["choices"][0]["logprobs"] = {"content": [{"top_logprobs": tokens}]}
    letters = Sample(STATE, 1, (), 1.0, ("A", "B", "C"))
    assert policy.valid_logprobs([letters])[0].tolist() == [-2.0, -1.0, -math.inf]
    with pytest.raises(UserError, match="tells no log-probabilities"):
        policy.valid_logprobs([letters])


NAMES = ["/home/first@main", "first-2024-08-06", "azure-deployment", "meta-llama/Llama-3.1-8B-Instruct"]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_the_first_reply_is_held_on_to(fake, name, capsys):
    fake.first = lambda body: well(body) | {"model": name}
    policy = ServerPolicy(fake.url, CHAT)
    assert capsys.readouterr().err == f"--server {fake.url}: first answers as {name}\n"
    fake.script += [choice("Action: a", model=name), choice("Action: a"), choice("Action: a", model="first")]
    assert texts(policy, request(), request()) == ["Action: a"] * 2
    with pytest.raises(UserError, match=f"answers by first, and by {name} before"):
        policy.sample([request()])


STRICT = [  # what a strict server says of a field, and which ones it leaves out so
    (lambda names: f"extra fields: {names}", {"min_p", "seed"}),
    (lambda names: "unrecognized request", {"repeat_penalty", "repetition_penalty", "min_p"}),
]


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize(("says", "refused"), STRICT)
def test_fields_that_a_strict_server_refuses_are_left_out(fake, says, refused, status, capsys):
    def strict(body: dict) -> object:
        wrong = sorted(refused & body.keys())
        return (status, {"error": {"message": says(wrong)}}) if wrong else well(body)

    fake.first, fake.script = strict, [strict] * 9
    policy = ServerPolicy(fake.url, CHAT)
    assert set(policy.server.left_out) == refused and len(texts(policy, request(3))) == 3
    assert all(refused.isdisjoint(body) and {*OPTIONAL} - refused < body.keys() for body in fake.sampled())
    warning = f"refuses {', '.join(policy.server.left_out)}: left out of each request"
    assert warning in capsys.readouterr().err


def test_a_chat_does_without_seed_and_stop(fake):
    strict = lambda body: (400, {"error": {"message": "no 'stop' here"}}) if "stop" in body else well(body)  # noqa: E731
    fake.first, fake.script = strict, [strict] * 2
    server = Server(fake.url)
    assert [server.chat([("user", "hm")], seed=1, stop=["."]).text for _ in "ab"] == ["yes"] * 2
    assert server.left_out == ["stop"] and [body["seed"] for body in fake.sampled()] == [1, 1]
    server = Server(fake.url)
    fake.script += [strict] * 4
    server.chat([("user", "hm")])  # has no such field
    assert server.chat([("user", "hm")], stop=["."]).text == "yes" and server.left_out == ["stop"]


def test_a_setting_is_not_left_out(fake, capsys):
    """A top_k of the checkpoint's own, nor what no field is to blame for."""
    fake.first = lambda body: (400, {"error": {"message": "top_k"}}) if "top_k" in body else well(body)
    assert ServerPolicy(fake.url, CHAT).server.left_out == ["top_k"] and "top_k" in capsys.readouterr().err
    for chat in (word_chat(top_k=5), CHAT):
        with pytest.raises(UserError, match=r"Error code: 400 - .*") as error:
            ServerPolicy(fake.url, chat)
        assert not isinstance(error.value, Refused) and not capsys.readouterr().err
        fake.first = 400


@pytest.mark.parametrize("kind", ASK)
@pytest.mark.parametrize("status", [400, 413, 422])
def test_what_is_refused_of_a_server_that_answers_is_the_answer(fake, kind, status, pauses):
    fake.script += [(status, {"error": {"message": "against our\nrules"}})]
    if kind == "chat":  # of a question by itself
        with pytest.raises(Refused) as error:
            ASK[kind](fake.url)
        answer = error.value
    else:
        answer = refusal_in(ASK[kind](fake.url))
    assert f"Error code: {status}" in str(answer) and "against our rules" in str(answer) and not pauses


def test_what_a_judge_is_refused_cannot_be_read(fake):
    judge = ChatPolicy(fake.url, "--judge", 7)
    fake.script += [422]
    assert sorted(c.text for c in judge.sample([request(2)])[0]) == ["", "yes"]
    fake.script += [422]
    assert judge.valid_logprobs([Sample(STATE, 1, (), 1.0, ("A", "B"))])[0].tolist() == [-math.inf] * 2


def test_a_refused_task_is_an_outcome_and_the_others_are_played(fake, fake_world, tmp_path, capsys):
    save_agent(tmp_path / "sft")
    left, filtered = choice("Action: left"), choice("", "content_filter")
    flags = ["--run", str(tmp_path), "--server", fake.url, "--method", "sample", "--limit", "3", "--in-flight", "1"]
    for n, refusal in enumerate((400, filtered)):
        fake.script = [left, left, refusal, left, left]
        q_search.main([*flags, "--skip", "0", "--out", str(tmp_path / f"{n}.jsonl")])
        lines = list(read_jsonl(tmp_path / f"{n}.jsonl"))
        assert [line["n_steps"] for line in lines] == [2, 0, 2] and ["refused" in line for line in lines] == [0, 1, 0]
        assert (lines[1]["reward"], lines[1]["task"], lines[1]["success"]) == (0, "find the purse", False)
        assert "sample: 1 of these tasks are refused, and count as 0" in capsys.readouterr().err
        assert not fake.script
    report.main(["--run", str(tmp_path), str(tmp_path / "0.jsonl")])


def test_a_refused_tree_is_its_root(fake, fake_world, tmp_path, capsys):
    save_agent(tmp_path / "sft")
    fake.script = [400, *[choice("Action: left")] * 9]
    run = ["--run", str(tmp_path)]
    flags = ["--server", fake.url, "--limit", "2", "--rollouts", "2", "--in-flight", "1", "--no-expert"]
    build_trees.main([*run, *flags, "--tasks", "new"])
    assert "1 of these tasks are refused: their trees are their roots alone" in capsys.readouterr().err
    lines = list(read_jsonl(tmp_path / "trees.jsonl"))
    assert ["refused" in line for line in lines] == [True] + [False] * (len(lines) - 1) and len(lines) > 2
    bellman.main(run)
    assert len(list(read_jsonl(tmp_path / "q_labels.jsonl"))) == len(lines)


HOPELESS = [
    ("{url}", "key\n", "OPENAI_API_KEY holds a space, a line end"),
    ("{url}", "ké", "OPENAI_API_KEY holds"),
    ("https{rest}", "key", "WRONG_VERSION_NUMBER"),
    ("http://127.0.0.1:99999/v1", "key", "Port out of range"),
    ("http://127.0.0.1:80a/v1", "key", "80a"),
    ("ftp://127.0.0.1/v1", "key", "no http://HOST:PORT/v1"),
    ("http:///v1", "key", "no http://HOST:PORT/v1"),
    ("http://[::1/v1", "key", "Invalid IPv6"),
    ("http://a b/v1", "key", "no http://HOST:PORT/v1"),
]


@pytest.mark.parametrize(("address", "key", "problem"), HOPELESS)
@pytest.mark.parametrize("model", ["", "#first"])
def test_what_cannot_succeed_is_told_at_once(fake, pauses, monkeypatch, address, key, problem, model):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UserError, match=problem) as error:
        Server(address.format(url=fake.url, rest=fake.url.removeprefix("http")) + model)
    assert not pauses and "key" not in str(error.value)


CONTEXTS = [
    ({"max_model_len": 512}, 512),
    ({"max_model_len": None, "parent": "base"}, 300),  # an adapter
    ({"context_length": 9999}, 4096),
    ({}, 4096),
]


@pytest.mark.parametrize(("entry", "context"), CONTEXTS)
def test_the_smaller_context_counts(fake, entry, context):
    fake.models[:] = [{"id": "base", "max_model_len": 300}, {"id": "first"} | entry]
    for holder in (ServerPolicy, lambda url, chat: ServedQNet(Server(url), chat)):
        chat = word_chat()
        chat.context = 4096
        holder(f"{fake.url}#first", chat)
        assert chat.context == context


def test_which_model_is_meant(fake):
    several = [{"id": "base"}, {"id": "adapter", "parent": "base"}]
    for models, says in ((["first"], "answers"), ([], "serves no model"), (several, "serves base, adapter: name one")):
        fake.models[:] = models
        with pytest.raises(UserError, match=f"{fake.url}: {says}"):
            ServerPolicy(fake.url, CHAT)
    for models in (several, ["not", "objects"]):  # a server may have no list
        fake.models[:] = models
        policy = ServerPolicy(f"{fake.url}#adapter", CHAT)
        assert len(texts(policy, request())) == 1 and policy.server.model == fake.sampled()[-1]["model"] == "adapter"
    fake.models[:] = several
    fake.first = lambda body: well(body) | {"model": "base"}
    with pytest.raises(UserError, match="answers by base, the base of adapter"):
        ServerPolicy(f"{fake.url}#adapter", CHAT)
    fake.first = 404
    with pytest.raises(UserError, match=r"404 - no; is the URL complete, with /v1\?"):
        ServerPolicy(f"{fake.url.removesuffix('/v1')}#adapter", CHAT)


@pytest.mark.parametrize("failure", [429, 503, 0])
def test_a_server_that_is_busy_or_away_is_waited_for(fake, failure, pauses, capsys):
    policy = ServerPolicy(fake.url, CHAT)
    first = texts(policy, request())
    fake.script += [failure] * 8
    assert texts(policy, request()) == first and len(pauses) == 8
    fake.script += [(429, {}, {"Retry-After": 100})]
    assert texts(policy, request()) == first and pauses.pop() == 100
    fake.script += [(429, {}, {"Retry-After": 300})]
    assert texts(policy, request()) == first and pauses.pop() == 120
    fake.script += [failure] * (TRIES + 1)
    with pytest.raises(UserError, match=str(failure or "Server disconnected")) as error:
        policy.sample([request()])
    assert not fake.script and 400 < sum(pauses[8:]) < 660 and "\n" not in str(error.value)
    assert capsys.readouterr().err == f"warning: --server {fake.url} is busy or away; retried for 10 minutes\n"


COUNT = itertools.count()
SEEDS = [("Action: left", "ignores seeds"), ("left {seed}", ""), ("left {count}", "keeps no seeds")]


@pytest.mark.parametrize(("text", "problem"), SEEDS)
def test_a_server_whose_seeds_do_nothing_is_told_of(fake, capsys, text, problem):
    fake.first = lambda body: choice(text.format(**body, count=next(COUNT)))
    fake.script += [choice("left")] * 4  # of which an agent may be sure
    assert texts(ServerPolicy(fake.url, CHAT), request(4)) == ["left"] * 4
    warning = capsys.readouterr().err
    assert problem in warning if problem else not warning


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


BYTES = Chat(chat_tokenizer("chatml"), Rendering(max_new_tokens=12, stop=()), 4096)


@pytest.mark.parametrize("chat", [CHAT, BYTES], ids=["the agent's tokenizer", "its own"])
def test_a_search_by_a_served_qnet_is_the_local_one(fake, fake_world, tmp_path, chat, capsys):
    save_agent(tmp_path / "sft")
    qnet, elsewhere = tmp_path / "qnet", tmp_path / "elsewhere"
    net = QNet(tiny_backbone(chat), chat, hidden=8).eval()
    qnet.mkdir()
    net.save_pretrained(qnet)
    fake.script += [503, *[partial(told, net=net)] * 99]
    address = fake.url.removeprefix("http://")  # HOST:PORT/v1 is no path

    def search(qnet: object, out: str) -> list[dict]:
        flags = ["--skip", "0", "--limit", "3", "--qnet"]
        q_search.main(["--run", str(tmp_path), "--out", str(tmp_path / out), *flags, str(qnet)])
        return [{**line, "seconds": 0} for line in read_jsonl(tmp_path / out)]

    assert search(address, "served.jsonl") == search(qnet, "local.jsonl")
    assert {len(body["input"]) for body in fake.seen[2:]} == {2}  # siblings are one call
    recipe = meta_of(tmp_path / "served.jsonl")["recipe"]
    assert (recipe["qnet_model"], recipe["qnet"]) == ("first", sha256(qnet))
    others = (f"{fake.url}#second", "served.jsonl"), (qnet, "served.jsonl"), (fake.url, "local.jsonl")
    for other, out in others:  # other weights wrote it
        with pytest.raises(UserError, match=r"begun with --qnet (first|None), not (second|None|first)"):
            search(other, out)
    mark = fingerprint(net.backbone, chat, net.score)
    meta_path(qnet).write_text(dump([{"fingerprint": mark, "recipe": {"env": "elsewhere"}}]))
    search(fake.url, "known.jsonl")
    assert f"{qnet}: was trained on elsewhere, and plays" in capsys.readouterr().err
    meta_path(qnet).write_text(dump([{"fingerprint": [mark[0] + 0.1, *mark[1:]]}]))
    with pytest.raises(UserError, match=r"has other weights \(a fixed text has another value, by 0\.100\)"):
        search(fake.url, "other.jsonl")
    qnet.rename(elsewhere)
    with pytest.raises(UserError, match=r"its folder is needed here, for its tokenizer: first or .*/qnet"):
        search(fake.url, "more.jsonl")
    fake.models[:] = [{"id": str(elsewhere)}]
    assert search(fake.url, "again.jsonl") == search(elsewhere, "local2.jsonl")


URLS = ["localhost:8001", "127.0.0.1:8001/v1#m", "gpu-3.lan:80", "[::1]:8000/v1", "https://a/v1"]
PATHS = ["runs/a:1", "qnet", "C:\\runs\\qnet", "./qnet:v2", "qnet:"]


@pytest.mark.parametrize("text", URLS + PATHS)
def test_a_server_or_a_path(text):
    assert is_url(text) == (text in URLS)


def test_nobody_there_and_what_is_asked_of_no_server(capsys):
    for model in ("", "#first"):
        with pytest.raises(UserError, match=r"--server http://127.0.0.1:9/v1: .*Connection refused"):
            Server(f"http://127.0.0.1:9/v1{model}")
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
