"""The agent or QNet on a server: against a fake one that is busy, fails, lies, or has other weights."""

import asyncio
import contextlib
import math
import re
import signal
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import (
    FIRST,
    FakeServer,
    FastLoop,
    completion,
    refused,
    save_agent,
    settings_of,
    tiny_backbone,
    tiny_lm,
    without_seconds,
    word_chat,
)

import q_search
from integrations import servers
from integrations.served import ServedPolicy, ServedQNet
from integrations.servers import Server
from qlass import UserError
from qlass.agent import load_agent
from qlass.batching import LogProb, Sample, Score, drive
from qlass.files import meta_of, meta_path, write_json
from qlass.inputs import sha256
from qlass.policy import QUESTION, Policy
from qlass.settings import Sampling
from train_qnet import QNet

CHAT = word_chat(temperature=0.8)
LENGTH = len(CHAT.prompt(FIRST))
AWAY = "http://127.0.0.1:9/v1#m"
NET = QNet(tiny_backbone(CHAT), CHAT, hidden=8).eval()


def request(n=1, key=("t", 0)):
    return Sample(FIRST, n, key, 0.8)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A minute of pauses and timeouts is six seconds; what must answer in time has the time, on a busy machine too."""
    return use_clock(monkeypatch, 10)


def use_clock(monkeypatch, speed):
    loop = FastLoop(speed)
    threading.Thread(target=loop.run_forever, daemon=True).start()
    monkeypatch.setattr(servers, "event_loop", lambda: loop)
    return loop


@pytest.fixture
def fake():
    with FakeServer(tiny_lm(CHAT), NET) as server:
        yield server


@pytest.fixture
def sft(tmp_path):
    return save_agent(tmp_path / "sft", temperature=0.8)


@pytest.fixture
def qnet(tmp_path):
    folder = tmp_path / "qnet"
    folder.mkdir()
    NET.save_pretrained(folder)
    return folder


def agent_on(fake, sft, **settings):
    """The agent, behind the question that tells whether the server has its weights."""
    policy = ServedPolicy(sft, Sampling(server=fake.url, **settings))
    fake.seen.clear()
    return policy


@pytest.fixture
def policy(fake, sft):
    return agent_on(fake, sft)


def answer(waiting):
    return asyncio.run_coroutine_threadsafe(waiting, servers.event_loop()).result()


def texts(policy, *requests):
    return [c.text for drawn in policy.sample(list(requests)) for c in drawn]


# ------------------------------------------------------------------------------------------------------ what is asked


def test_a_candidate_is_one_completion_of_token_ids(fake, sft, policy):
    (drawn,) = policy.sample([request(3)])
    assert len(fake.seen) == len(drawn) == 3
    assert all((c.tokens, math.isnan(c.logprob)) == (3, True) for c in drawn)
    first = [c.text for c in drawn]
    for body in fake.seen:
        assert f"Action: left {body.pop('seed')}" in first
        assert body == {
            "model": "first",
            "prompt": CHAT.prompt(FIRST),
            "max_tokens": CHAT.rendering.max_new_tokens,
            "temperature": 0.8,
            "stop": [],
            "stop_token_ids": [CHAT.stop_id],
            "top_p": 1,  # else those of the model's generation_config.json
            "top_k": -1,
            "min_p": 0,
            "repetition_penalty": 1,
        }
    assert len(set(first)) == 3 and texts(policy, request(2)) == first[:2]
    other = agent_on(fake, sft, seed=1)
    assert not {*texts(other, request(3)), *texts(policy, request(3, ("t", 1)))} & set(first)


def test_an_action_ends_where_a_stop_text_stands_and_flags_reach_the_server(fake, tmp_path):
    sft = save_agent(tmp_path / "sft", stop=("\nObservation:", "\nTask:"))
    flags = f"--sft {sft} --server {fake.address}#second --max-new-tokens 7 --temperature 0.5"
    policy = load_agent(sft, settings_of(q_search, flags))
    fake.seen.clear()
    fake.script += [completion("Action: left\nTask: another", read=LENGTH)]
    assert texts(policy, request()) == ["Action: left"]
    body = fake.seen[0]
    assert (body["model"], body["max_tokens"], body["stop"]) == ("second", 7, ["\nObservation:", "\nTask:"])
    assert policy.chat.rendering.temperature == 0.5


def test_the_log_probability_of_a_text_is_the_local_agents(fake, policy):
    local = Policy(fake.model, CHAT)
    asked = [LogProb(FIRST, ("Action: left", "Action: right")), LogProb(FIRST, ("Action: walk",))]
    for mine, theirs in zip(policy.likelihoods(asked), local.likelihoods(asked), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_an_action_that_the_server_cuts_is_told(fake, policy, monkeypatch):
    said = []
    monkeypatch.setattr("integrations.served.warn", said.append)
    fake.script = [completion("Action: le", "length", LENGTH)]
    policy.sample([request()])
    assert said == [f"{policy.server.url}: an action is cut at --max-new-tokens 12"]


# ---------------------------------------------------------------------------------- busy, away, lying, of other weights

FAULTS = [  # no text may come from these
    (completion("Action: left", read=3), "reads"),  # a short context, or another model
    (completion("", None, LENGTH), ""),  # not finished
    (completion("", "content_filter", LENGTH), ""),
    (completion("Action: left", read=LENGTH) | {"choices": []}, "it answers"),
    (completion("Action: left", read=LENGTH) | {"usage": None}, "it answers"),
    ({"error": {"message": "no endpoint", "code": 404}}, "it answers .*no endpoint"),  # a router's, with status 200
    ("not JSON's object", "it answers"),
    (404, "Error code: 404 .*not now"),
    (b"<html>the page of a gateway</html>", "it answers '<html>.*Invalid JSON"),
]


@pytest.mark.parametrize(("reply", "says"), FAULTS)
def test_a_reply_that_is_none_stops_the_run(fake, policy, reply, says):
    fake.script += [reply]
    with refused(f"^{fake.url}: {says}"):
        policy.sample([request()])
    assert len(fake.seen) == 1


def hang(body, connection):
    """No reply, until the client closes the connection."""
    assert connection.recv(1) == b""
    return 0


def trickle(body, connection):
    """A byte now and then, until the client closes the connection."""
    with contextlib.suppress(OSError):
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        while True:
            connection.sendall(b" ")
            time.sleep(0.05)
    return 0


WAITING, AGAIN = "is busy or away: waiting for it, 10 minutes at most", ": answers again"
TROUBLE = {  # for ever: how often a server is asked in ten minutes, and for how many seconds it is left alone
    "hangs": (hang, 2, 2, 0),
    "trickles": (trickle, 1, 1, 0),
    "fails": (500, 5, 79, 0.5),
    "times out": (408, 5, 79, 0.5),
    "resets": (0, 5, 79, 0.5),
    "a second": ((429, 1), 5, 79, 1),
    "half a minute": ((429, 30), 5, 20, 30),
    "three minutes": ((503, 180), 3, 4, 180),
    "an hour": ((429, 3600), 1, 1, 3600),
}


@pytest.mark.parametrize(("asked", "seconds"), [("2.5", 2.5), ("tomorrow", 86400), ("soon", 0), (None, 0)])
def test_a_server_may_ask_for_seconds_or_for_a_time(asked, seconds):
    if asked == "tomorrow":  # as HTTP writes a time
        asked = format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)
    error = SimpleNamespace(response=SimpleNamespace(headers={"retry-after": asked} if asked else {}))
    assert servers.retry_after(error) == pytest.approx(seconds, rel=0.1)


def test_one_deadline_holds_for_one_question_whatever_the_server_does(monkeypatch, capsys):
    clock = use_clock(monkeypatch, 60)

    async def outcome(fake, failure):
        server, times = Server(fake.url), [0.0]
        async with one_by_one:
            await server.complete([1] * LENGTH)

        def trouble(body):
            times.append(clock.time())
            return failure(body, fake.connections[-1]) if callable(failure) else failure

        fake.well, times[0] = trouble, clock.time()
        with refused(rf"^{fake.url}: no answer in 600 seconds \(--timeout\)") as error:
            await server.complete([1] * LENGTH)
        return [*times, clock.time()], str(error.value)

    async def outcomes(fakes):
        return await asyncio.gather(*map(outcome, fakes, [failure for failure, *_ in TROUBLE.values()]))

    one_by_one = asyncio.Lock()
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(FakeServer()) for _ in TROUBLE]
        ends = answer(outcomes(fakes))
    told = capsys.readouterr().err
    for (name, (_, least, most, pause)), fake, ((start, *times, end), error) in zip(
        TROUBLE.items(), fakes, ends, strict=True
    ):
        assert least <= len(times) <= most and end - start < 1200, (name, len(times), end - start)
        assert all(later - before >= pause for before, later in pairwise(times)), name
        assert ("it asks for 3600 seconds" in error) == (name == "an hour")
        assert (f"{fake.url}: {WAITING}" in told) == (name not in ("an hour", "trickles"))


@pytest.mark.parametrize(
    ("failures", "many", "speed", "lines"),
    [
        ([503] * 6, 1, 60, 2),
        ([(429, 60)] * 2, 1, 60, 2),
        ([0] * 6, 1, 60, 2),
        ([(429, 60)] * 3, 3, 60, 2),  # those that wait at once are one line
        ([503], 8, 1, 0),  # a short pause is none
    ],
)
def test_a_server_that_comes_back_goes_on_and_both_are_told_each_time(
    fake, policy, monkeypatch, capsys, failures, many, speed, lines
):
    use_clock(monkeypatch, speed)
    expected = texts(policy, request(many))
    for _ in range(2):
        fake.script += failures
        assert texts(policy, request(many)) == expected
    told = capsys.readouterr().err
    assert (told.count(WAITING), told.count(AGAIN)) == (lines, lines)


def test_a_server_that_has_never_answered_is_tried_twice(fake):
    fake.script += [503] * 9
    with refused(f"^{fake.url}: "):
        answer(Server(fake.url).complete([1]))
    assert len(fake.seen) == 2


@pytest.mark.parametrize("width", [None, 3])
def test_in_flight_bounds_the_requests(fake, sft, width):
    policy = agent_on(fake, sft, in_flight=width)
    fake.pause = 0.3
    assert len(texts(policy, request(12))) == 12
    assert fake.most == width if width else fake.most > 3


def test_a_player_waits_for_no_other(fake, policy):
    """One whose answer does not come until all others have ended, each step of whom a local model scores."""
    others_end = threading.Event()

    def slow(body):
        assert others_end.wait(20)
        return fake.well(body)

    async def episode(player):
        drawn = []
        for step in range(3):
            (candidate,) = await request(1, (player, step))
            await Score(FIRST, (candidate.text,))
            drawn.append(candidate.text)
        return drawn

    fake.script += [slow]
    played = []
    models = {Sample: policy.sample, Score: lambda requests: [[0.0]] * len(requests)}
    for drawn in drive(map(episode, range(5)), models, 3):
        played.append(drawn)
        if len(played) == 4:
            others_end.set()
    assert sorted(played) == sorted(texts(policy, *(request(1, (i, t)) for t in range(3))) for i in range(5))


def test_ctrl_c_stops_at_once(fake, policy):
    """Also where a reply never comes and others wait."""
    end = threading.Event()

    def stall(body):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        end.wait(20)
        return 503

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
    fake.script += [503, 503, stall]
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        policy.sample([request(4)])
    assert time.monotonic() - start < 5
    end.set()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("seed", "bits", "told"), [(0, "", False), (1, "", True), (1, "--load-in 4bit", False)])
def test_a_server_of_other_weights_than_the_checkpoints_is_told(fake, sft, seed, bits, told, capsys):
    """By how much they differ is always said; weights in few bits may differ by more."""
    write_json(meta_path(sft), {"fingerprint": Policy(fake.model, CHAT).likelihoods([QUESTION])[0]})
    fake.model, error = tiny_lm(CHAT, seed, initializer_range=0.1 if bits else 0.3), ""
    try:
        load_agent(sft, settings_of(q_search, f"--sft {sft} --server {fake.url} {bits}"))
    except UserError as refusal:
        error = str(refusal)
    assert ("other weights" in error) == told
    assert f"a fixed text differs by {'' if seed else '0.000'}" in error + capsys.readouterr().err


@pytest.mark.parametrize("reply", [completion("x", "length", written=1), completion("x", prompt_logprobs=None)])
def test_a_server_that_tells_no_log_probabilities_writes_and_is_no_judge(fake, sft, reply, capsys):
    """As SGLang: whether it has the agent's weights can't be known."""
    write_json(meta_path(sft), {"fingerprint": [-1.0, -2.0]})

    def silent(body):
        reply["usage"]["prompt_tokens"] = len(body["prompt"])
        return reply

    fake.script += [silent] * 2
    policy = agent_on(fake, sft)
    assert re.search("no log-probabilities .*: whether .* has these weights is not known", capsys.readouterr().err)
    assert texts(policy, request())
    fake.script += [silent]
    with refused("tells no log-probabilities of a prompt"):
        policy.likelihoods([LogProb(FIRST, ("Action: left",))])


# ------------------------------------------------------------------------------------------------------- a served QNet


def test_a_served_qnet_gives_the_local_values_and_no_others(fake, qnet):
    served = ServedQNet(f"{fake.address}#{qnet}", Sampling())
    fake.seen.clear()
    siblings = Score(FIRST, ("Action: left", "Action: right"))
    assert served.score([siblings])[0] == pytest.approx(NET.score([siblings])[0], abs=1e-5)
    assert len(fake.seen) == 1  # siblings are one call

    def not_finite(body):
        reply = fake.embeddings(body)
        for entry in reply["data"]:
            entry["embedding"] = [math.inf]
        return reply

    def of_texts(indices):
        """A reply with the embeddings of these texts alone."""
        return lambda body: (reply := fake.embeddings(body)) | {"data": [reply["data"][i] for i in indices]}

    usage = {"prompt_tokens": 7, "total_tokens": 7}
    fake.script += [lambda body: fake.embeddings(body) | {"usage": usage}, of_texts([0]), of_texts([1, 1]), not_finite]
    for words in ("reads", "reads", "reads", "answers"):
        with refused(words):
            served.score([siblings])


def test_a_search_by_a_served_qnet_is_the_local_one(fake, qnet, sft, fake_world, tmp_path):
    def search(qnet, out):
        flags = f"--run . --preset paper --sft {sft} --out {out} --limit 3 --skip 0 --qnet {qnet}"
        q_search.main(flags.split())
        return without_seconds(tmp_path / out)

    mark = NET.score([QUESTION])[0]
    write_json(meta_path(qnet), {"fingerprint": mark, "recipe": {}, "inputs": {}})
    assert search(f"{fake.address}#{qnet}", "served.jsonl") == search(qnet, "local.jsonl")
    assert meta_of(tmp_path / "served.jsonl")["recipe"]["qnet"] == sha256(qnet)
    write_json(meta_path(qnet), {"fingerprint": [mark[0] + 0.1, mark[1]], "recipe": {}, "inputs": {}})
    with refused(r"differs by 0\.100 .*other weights"):
        search(f"{fake.address}#{qnet}", "other.jsonl")


HTTPS = "https://x.org/v1#m"


@pytest.mark.parametrize(
    ("open_door", "variables", "says"),
    [
        (lambda: Server("http://x.org/v1"), {}, "http://x.org/v1: name its model, URL#MODEL"),
        (lambda: Server(HTTPS), {"ALL_PROXY": "socks5://127.0.0.1:9"}, f"{HTTPS}: .*[$]ALL_PROXY"),
        (lambda: Server(HTTPS), {"SSL_CERT_FILE": "/no/such.pem"}, f"{HTTPS}: .*[$]SSL_CERT_FILE"),
        (lambda: answer(Server(AWAY).complete([1])), {}, f"{AWAY}: Connection error"),
        (
            lambda: ServedPolicy(save_agent(Path("sft"), candidates="valid"), Sampling(server=AWAY)),
            {},
            "--server: the agent chooses by",
        ),
        (lambda: ServedQNet(f"{AWAY}/none", Sampling()), {}, f"{AWAY}/none: no folder m/none: the server's model has"),
    ],
)
def test_a_door_that_cannot_open_is_told_in_one_line(monkeypatch, open_door, variables, says):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with refused(f"^{says}"):
        open_door()
