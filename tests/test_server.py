"""Sampling on servers: against a fake one that fails, stalls and lies, and a real one where its packages are there."""

import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from pathlib import Path

import pytest
from fakes import FakeEnv, chat_tokenizer, tiny_lm, word_chat
from json_server import json_server, started, stopped

import build_trees
import q_search
from qlass import UserError
from qlass.chat import Chat, Rendering, State
from qlass.driver import Sample
from qlass.files import read_trees
from qlass.flags import add_sampling, load_agent
from qlass.policy import Policy
from qlass.server import Endpoint, ServerPolicy

CHAT = word_chat(temperature=0.8)
STATE = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand at start")), "find the purse")


def asked(n: int = 1, key: tuple = ("t", 0), temperature: float = 0.8) -> Sample:
    return Sample(STATE, n, key, temperature)


class Fake:
    """A completion server: `script` holds statuses, replies or seconds to stall, in turn; then it completes prompts."""

    def __init__(self, ids: bool = True, most: int = 100) -> None:
        self.ids, self.most, self.script, self.seen, self.busy, self.peak = ids, most, [], [], 0, 0
        self.lock = threading.Lock()
        self.http = started(json_server(self.answer))
        self.url = self.http.url

    def answer(self, body: dict) -> tuple[int, dict | list]:
        with self.lock:
            self.seen.append(body)
            turn = self.script.pop(0) if self.script and body["max_tokens"] > 1 else None
            self.busy += 1
            self.peak = max(self.peak, self.busy)
        time.sleep(turn if isinstance(turn, float) else 0.02)
        with self.lock:
            self.busy -= 1
        if not self.ids and isinstance(body["prompt"], list):
            return 400, {"error": "prompt must be a string"}
        if isinstance(turn, int):
            return turn, {"error": "no"}
        return 200, turn if isinstance(turn, (dict, list)) else self.complete(body)

    def complete(self, body: dict) -> dict:
        n = min(body.get("n", 1), self.most)
        return {"choices": [choice(f"Action: left {body.get('seed', 0)}.{k}") for k in range(n)],
                "usage": {"total_tokens": 7}}  # fmt: skip

    def sampled(self) -> list[dict]:
        return [body for body in self.seen if body["max_tokens"] > 1]


def choice(text: str) -> dict:
    return {"text": text, "logprobs": {"token_logprobs": [-0.5, -0.25, -0.25]}}


@pytest.fixture
def fakes():
    made = []

    def make(**options):
        made.append(Fake(**options))
        return made[-1]

    yield make
    for fake in made:
        stopped(fake.http)


def served(*some: Fake, chat: Chat = CHAT, **options) -> ServerPolicy:
    return ServerPolicy([f.url for f in some], chat, pause=0, **options)


def test_a_request_is_one_completion_of_token_ids(fakes):
    fake = fakes()
    policy = served(fake)
    (drawn,) = policy.sample([asked(3)])
    (body,) = fake.sampled()
    assert body["prompt"] == CHAT.prompt(STATE) and body["n"] == 3 and body["model"] == "first"
    assert body["temperature"] == 0.8 and body["max_tokens"] == CHAT.rendering.max_new_tokens
    assert body["stop"] == ["<end>"] and body["stop_token_ids"] == [CHAT.stop_id]
    assert [c.text for c in drawn] == [f"Action: left {body['seed']}.{k}" for k in range(3)]
    assert [(c.tokens, c.logprob) for c in drawn] == [(3, -1.0)] * 3 and policy.computed == 7
    assert [c.text for c in served(fake).sample([asked(3)])[0]] == [c.text for c in drawn]  # the same seed again
    assert served(fake, seed=1).sample([asked(3)]) != [drawn] != policy.sample([asked(3, ("t", 1))])


def test_a_prompt_that_is_too_long_is_no_fault_of_the_server(fakes):
    policy = served(fakes(), fakes(), chat=word_chat(max_new_tokens=7))
    policy.chat.context = 8
    with pytest.raises(UserError, match="--truncate oldest"):
        policy.sample([asked()])
    assert len(policy.open) == 2


def test_only_one_thread_at_a_time_has_the_tokenizer(fakes, monkeypatch):
    """Where a text holds a special token's, the tokenizer has another setting for as long as it reads that text."""
    policy, prompt, callers = served(fakes()), CHAT.prompt, []
    monkeypatch.setattr(
        policy.chat, "prompt", lambda state: callers.append(threading.current_thread()) or prompt(state)
    )
    policy.sample([asked(1, ("t", i)) for i in range(8)])
    assert callers == [threading.main_thread()] * 8


def test_sampling_settings_reach_the_server(fakes):
    fake, chat = fakes(), word_chat(top_p=0.9, top_k=5, stop=("Observation:",), max_new_tokens=7)
    served(fake, chat=chat).sample([asked()])
    (body,) = fake.sampled()
    assert (body["top_p"], body["top_k"], body["max_tokens"]) == (0.9, 5, 7)
    assert body["stop"] == ["<end>", "Observation:"]


def test_a_server_of_texts_alone(fakes):
    fake, chat = fakes(ids=False), Chat(chat_tokenizer("chatml"), Rendering())
    served(fake, chat=chat).sample([asked()])
    (body,) = fake.sampled()
    assert body["prompt"] == chat.tokenizer.apply_chat_template(
        STATE.dump(), tokenize=False, add_generation_prompt=True
    )
    assert "top_k" not in body and "stop_token_ids" not in body


def test_a_server_that_gives_one_at_a_time_is_asked_again(fakes):
    fake = fakes(most=1)
    (drawn,) = served(fake).sample([asked(3)])
    assert len(drawn) == 3 and len({c.text for c in drawn}) == 3  # with other seeds
    assert [body["n"] for body in fake.sampled()] == [3, 2, 1]


def test_greedy_is_asked_for_once(fakes):
    fake = fakes()
    (drawn,) = served(fake).sample([asked(4, temperature=0.0)])
    assert len(drawn) == 4 and len(set(drawn)) == 1 and [body["n"] for body in fake.sampled()] == [1]


def test_many_requests_are_under_way_at_once_and_answered_in_order(fakes):
    fake = fakes()
    policy = served(fake, parallel=8)
    requests = [asked(1, ("t", i)) for i in range(24)]
    drawn = policy.sample(requests)
    assert drawn == [policy.sample([r])[0] for r in requests] and 2 <= fake.peak <= 8


def test_faults_that_pass(fakes):
    fake = fakes()
    policy = served(fake, timeout=0.5)
    fake.script += [503, 429, 2.0, [1, 2]]  # overloaded, too often, stalled, no object
    (drawn,) = policy.sample([asked()])
    assert len(drawn) == 1 and len(fake.sampled()) == 5


LIES = [
    {"choices": [{"message": {"content": "a chat"}}]},
    {"choices": "none"},
    {"choices": [{"text": None}]},
]


@pytest.mark.parametrize("lie", LIES)
def test_answers_that_are_no_completions(fakes, lie):
    fake = fakes()
    policy = served(fake)
    fake.script += [lie]
    with pytest.raises(UserError, match="no completion in its answer"):
        policy.sample([asked()])


def test_what_a_server_leaves_out_or_adds(fakes):
    fake = fakes()
    policy = served(fake)
    fake.script += [{"choices": [{"text": "Action: left <end> more"}, {"text": "Action: right"}, choice("third")]}]
    (drawn,) = policy.sample([asked(2)])
    assert [c.text for c in drawn] == ["Action: left", "Action: right"]  # up to the end of the turn, and no third
    assert math.isnan(drawn[0].logprob) and drawn[0].tokens == 3  # counted here: Action: left <end>
    fake.script += [{"choices": []}, {"choices": []}, {"choices": []}]
    with pytest.raises(UserError, match="without a choice"):
        policy.sample([asked()])


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_is_final(fakes, status):
    fake = fakes()
    policy = served(fake)
    fake.script += [status]
    with pytest.raises(UserError, match=str(status)) as error:
        policy.sample([asked()])
    assert len(fake.sampled()) == 1 and "\n" not in str(error.value)


def test_several_servers_share_the_load_and_one_may_die(fakes, capsys):
    one, two = fakes(), fakes()
    policy = served(one, two, parallel=4)
    requests = [asked(1, ("t", i)) for i in range(16)]
    drawn = policy.sample(requests)
    assert min(len(one.sampled()), len(two.sampled())) >= 4
    one.script += [500] * 100
    assert policy.sample(requests) == drawn
    assert "going on with 1 other" in capsys.readouterr().out
    two.script += [500] * 100
    with pytest.raises(UserError, match=r"500.*what is written so far is kept"):
        policy.sample(requests)


def test_nobody_there_and_the_key(fakes, monkeypatch):
    with pytest.raises(UserError, match=r"--server http://127\.0\.0\.1:9/v1/models.*leave --server out"):
        ServerPolicy(["http://127.0.0.1:9/v1"], CHAT, pause=0)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    seen = []
    monkeypatch.setattr(
        "urllib.request.urlopen", lambda request, timeout: seen.append(request) or exec("raise OSError")
    )
    with pytest.raises(UserError):
        Endpoint("http://x/v1", pause=0)
    assert seen[0].get_header("Authorization") == "Bearer sesame" and len(seen) == 5


@pytest.mark.parametrize(
    "listed", [{}, {"data": None}, {"data": []}, {"data": ["x"]}, {"data": [{}]}, {"data": {"a": 1}}]
)
def test_a_server_that_lists_no_model_is_asked_without_a_name(listed, monkeypatch):
    monkeypatch.setattr(Endpoint, "call", lambda *_: listed)
    assert Endpoint("http://x/v1").model == ""


def test_valid_actions_need_a_model_here(fakes):
    with pytest.raises(UserError, match="--candidates free"):
        ServerPolicy([fakes().url], word_chat(candidates="valid"))
    with pytest.raises(UserError, match="valid actions"):
        served(fakes()).sample([Sample(STATE, 1, ("t",), 1.0, ("Action: left",))])


# --------------------------------------------------------------------------------------------------- flags and engines


def saved(folder, chat):
    tiny_lm(chat).save_pretrained(folder)
    chat.save(folder)
    return folder


def arguments(folder, *argv: str):
    parser = ArgumentParser()
    add_sampling(parser)
    for name in ("--device", "--load-in"):
        parser.add_argument(name)
    parser.add_argument("--sft", type=Path)
    parser.set_defaults(env="webshop", seed=0, temperature=None)
    return parser.parse_args(["--sft", str(folder), *argv])


def test_flags_change_what_the_checkpoint_says(tmp_path, fakes):
    folder = saved(tmp_path, word_chat(temperature=0.8))
    agent = load_agent(arguments(folder))
    assert isinstance(agent, Policy) and agent.chat.rendering == word_chat(temperature=0.8).rendering
    flags = ["--max-new-tokens", "5", "--top-p", ".5", "--top-k", "3", "--stop", "Observation:", "--truncate", "oldest",
             "--cache-gb", "0.5", "--decode-tokens", "99"]  # fmt: skip
    with pytest.raises(UserError, match="--stop can't be"):
        load_agent(arguments(folder, "--stop", ""))
    agent = load_agent(arguments(folder, *flags))
    r = agent.chat.rendering
    assert (r.max_new_tokens, r.top_p, r.top_k, r.stop, r.truncate) == (5, 0.5, 3, ("Observation:",), "oldest")
    assert agent.fast.budget == 99 and agent.fast.cache.room == 1 << 29
    url = fakes().url
    there = load_agent(arguments(folder, "--server", f"{url},{url}#second", "--top-k", "3"))
    assert [s.model for s in there.servers] == ["first", "second"] and there.chat.rendering.top_k == 3
    assert there.chat.context == 4096 and len(there.sample([asked()])[0]) == 1


def test_a_server_does_not_tell_how_likely_a_text_is(tmp_path, fakes):
    common = ["--env", "frozenlake", "--run", str(tmp_path), "--sft", str(saved(tmp_path / "sft", word_chat()))]
    with pytest.raises(UserError, match="likeliest: a server does not tell"):
        q_search.main([*common, "--method", "greedy", "likeliest", "--server", fakes().url])
    env = FakeEnv()
    asked = q_search.methods(q_search.arguments([*common, "--method", "all", "--server", "http://x/v1"]), env, {})
    assert "likeliest" not in {method.name for method in asked}


def stages_on(url: str, run: Path, folder: Path) -> None:
    """Trees and search by the commands of a user, sampled on a server."""
    common = ["--env", "frozenlake", "--run", str(run), "--sft", str(folder), "--limit", "2"]
    played = {}
    for where in ([], ["--server", url]):
        out = run / f"results-{len(where)}.jsonl"
        q_search.main([*common, "--method", "greedy", "--max-steps", "3", "--out", str(out), *where])
        played[len(where)] = [[step["action"] for step in json.loads(line)["steps"]] for line in out.open()]
    assert played[0] == played[2] and len(played[0]) == 2 and all(map(any, played[0]))
    build_trees.main([*common, "--rollouts", "2", "--steps", "3", "--server", url])
    trees = list(read_trees(run / "trees.jsonl"))
    assert len(trees) == 2 and all(len(tree) > 3 for tree in trees)
    assert json.loads((run / "trees.meta.json").read_text())["arguments"]["server"] == url


HAS_SERVE = all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn", "openai", "accelerate"))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SERVE, reason="transformers serve needs fastapi, uvicorn, openai and accelerate")
def test_transformers_serve_writes_what_the_model_here_writes(tmp_path):
    chat = Chat(chat_tokenizer("chatml"), Rendering(max_new_tokens=12))
    folder = saved(tmp_path / "sft", chat)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as served,
    ):
        try:
            deadline = time.time() + 120
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert served.poll() is None and time.time() < deadline, (tmp_path / "log").read_text()
                    time.sleep(0.5)
            there = ServerPolicy([f"http://127.0.0.1:{port}/v1#{folder}"], chat, parallel=2)
            here = Policy.load(folder)
            first = State.first(FakeEnv(), "you stand at start", {"task": "find the purse"})
            for state in (first, first.then("Action: left", "Observation: you stand")):
                greedy = Sample(state, 2, ("t",), 0.0)
                assert [c.text for c in there.sample([greedy])[0]] == [c.text for c in here.sample([greedy])[0]]
            assert len(there.sample([Sample(first, 3, ("t",), 0.8)])[0]) == 3
            stages_on(f"http://127.0.0.1:{port}/v1#{folder}", tmp_path, folder)
        finally:
            served.terminate()
