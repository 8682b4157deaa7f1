"""What other programs take of this one, in the real ones where they are installed (requirements-integrations.txt)."""

import importlib
import itertools
import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import FakeEnv, chat_tokenizer, served, serving, tiny_backbone, tiny_lm, word_chat
from transformers import AutoModel, GemmaConfig, HeliumConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

import envs
from docs.switches import Switches
from integrations import trackers
from integrations.trl import games, prompts
from integrations.values import episode_reward, step_reward, turn_values
from qlass import UserError
from qlass.batching import Score
from qlass.chat import Chat, Rendering
from qlass.messages import State
from qlass.optional.served_qnet import ServedQNet
from qlass.optional.server import Server
from train_qnet import QNet, scorer

# ------------------------------------------------------ QNet's values: verifiers, vLLM on a CPU (requirements-vllm.txt)

MOVES = ["right", "right", "left"]


@pytest.fixture(scope="module")
def qnet(value_net):
    return scorer(QNet.from_pretrained(value_net))


def played(qnet) -> tuple[State, list[float]]:
    """An episode, and Q of its actions as a search asks for it."""
    env, q = FakeEnv(), []
    state = State.first(env, *env.reset(options={"task_id": "test0"}))
    for move in MOVES:
        q += qnet.score([Score(state, (f"Action: {move}",))])[0]
        state, *_ = state.act(env, f"Action: {move}")
    return state, pytest.approx(q)


def test_each_turn_has_the_value_that_a_search_sees(qnet):
    state, expected = played(qnet)
    q, gains = turn_values(qnet, state.dump(), state.task)
    assert q == expected and len(set(q)) == 3
    assert [sum(gains[: n + 1]) for n in range(3)] == pytest.approx(q)
    assert turn_values(qnet, state.dump()[:3], state.task) == ([], [])
    with pytest.raises(UserError, match="begin with an instruction and the agent's OK"):
        turn_values(qnet, state.dump()[2:])
    for aid in ("mark_matches", "compact"):  # of the tiny model, which reads no page without it
        chat = word_chat(**{aid: True})
        with pytest.raises(UserError, match=r"the task's sentence, so give it: turn_values\(\.\.\., task=\)"):
            turn_values(QNet(tiny_backbone(chat), chat, hidden=8), state.dump())


@pytest.mark.slow
def test_a_rollout_of_verifiers_has_step_rewards(qnet):
    vf = pytest.importorskip("verifiers.legacy", reason="pip install -r requirements-integrations.txt")
    from datasets import Dataset

    state, expected = played(qnet)
    gain, turns = step_reward(qnet), iter(MOVES)

    class World(vf.MultiTurnEnv):
        async def setup_state(self, state):
            state["env"] = FakeEnv()
            state["env"].reset(options={"task_id": "test0"})

        async def env_response(self, messages, state, **_):
            after, _, done = State((), "").act(state["env"], messages[-1].content)
            answer = [{"role": "user", "content": after.observation}]
            state["final_env_response"] = answer if done else None
            return answer

        async def add_trajectory_step(self, state, step):
            await super().add_trajectory_step(state, step)
            state.add_step_reward(await gain(state))

    def model(body):
        message = {"role": "assistant", "content": f"Action: {next(turns)}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"id": "1", "created": 0, "object": "chat.completion", "model": "m", "choices": [choice]}

    row = {"prompt": state.dump()[:3], "info": {"task_sentence": state.task}}
    env = World(dataset=Dataset.from_list([row]), rubric=vf.Rubric(funcs=[lambda state: state.total_step_reward()]))
    with serving(model) as url:
        client, rows = vf.ClientConfig(api_base_url=f"{url}/v1"), env.get_dataset().to_list()
        out = env.generate_sync(rows, client, model="m", state_columns=["trajectory"])["outputs"][0]
    assert list(itertools.accumulate(step["reward"] for step in out["trajectory"])) == expected
    assert out["reward"] == pytest.approx(sum(step["reward"] for step in out["trajectory"]))


VLLM = shutil.which("vllm")
KINDS = [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, GemmaConfig, HeliumConfig]  # the last by transformers
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.3, "pad_token_id": 0}


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="no vllm on the PATH")
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_reads_a_qnets_folder_and_gives_its_values(tmp_path, monkeypatch, kind):
    torch.manual_seed(0)
    chat, state = word_chat(), State((("user", "walk"), ("assistant", "OK"), ("user", "you stand at start")), "")
    net = QNet(AutoModel.from_config(kind(vocab_size=len(chat.tokenizer), **SIZES)), chat, hidden=8).eval()
    net.save_pretrained(tmp_path)
    serve = [VLLM, "serve", str(tmp_path), "--hf-overrides", '{"architectures": ["QNet"]}']
    serve += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    env = dict(VLLM_TARGET_DEVICE="cpu", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # with "" vLLM believes in Triton
    with served(serve, tmp_path / "log", **env) as url:
        there = ServedQNet(Server(f"{url}/v1"), chat)
        asked = [Score(s, ("Action: left", "Action: right")) for s in (state, state.then("Action: left", "you"))]
        for mine, local in zip(there.score(asked), net.score(asked), strict=True):
            assert mine == pytest.approx(local, abs=1e-4)


# ------------------------------------------ TRL's trainer on an environment, with a model that was taught to call `act`

WAYS = ["left", "down", "right", "up"]
CALL, CLOSE = '<tool_call>\n{"name": "act", "arguments": {"action": "', '"}}\n</tool_call>'


def test_an_episode_through_the_class(monkeypatch):
    monkeypatch.setattr(envs, "make", lambda name, **options: FakeEnv(**options))
    make = games("fake")
    one, other = make(), make()
    assert one.reset(task_id="train1", prompt=[]) == other.reset(task_id="train2") == "you stand at start"
    assert one.act("Thought: hm\nAction: left") == "you stand at start left" and one.get_reward() == 0
    env = FakeEnv()
    assert one.state == State.first(env, *env.reset(options={"task_id": "train1"})).act(env, "Action: left")[0]
    assert [one.act("right"), one.act("left")][-1] == "you stand at start left right left" and one.get_reward() == 0.5
    assert other.act("left") == "you stand at start left"
    with pytest.raises(ValueError, match="the episode is over"):
        one.act("left")
    one.reset(task_id="train1")
    assert one.get_reward() == 0 and not one.over
    first, other = prompts("fake", limit=2)
    assert (first["task_id"], other["task_id"]) == ("train0", "train1")
    assert first["prompt"][0]["content"].startswith("walk")


def caller(chat, tokenizer, samples: int = 300):
    """A tiny model that writes a call of `act` with any move, whatever it reads."""
    call, close, *moves = tokenizer.convert_tokens_to_ids([CALL, CLOSE, *WAYS])
    ask = tokenizer("<|im_start|>assistant\n").input_ids
    model, size = tiny_lm(chat), len(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(samples):
        reading = torch.randint(256, (16, 40))
        turn = torch.tensor([[*ask, call, moves[i % 4], close, tokenizer.eos_token_id] for i in range(16)])
        ids = torch.cat([reading, turn], 1)
        logits = model(ids).logits[:, -5:-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, size), ids[:, -4:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.slow
def test_two_updates_of_the_real_trainer(tmp_path):
    pytest.importorskip("trl", reason="pip install -r requirements-integrations.txt")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = chat_tokenizer("chatml")
    tokenizer.add_tokens([CALL, CLOSE, *WAYS])
    chat = Chat(tokenizer, Rendering())
    model, qnet = caller(chat, tokenizer), QNet(tiny_backbone(chat, 3), chat, hidden=16)
    reward, paid = episode_reward(qnet, mean=False), []

    def last_q(environments, **_):
        q = [turn_values(qnet, game.state.dump(), game.state.task)[0] for game in environments]
        paid.append([values[-1] for values in q if values])  # of episodes with an action
        return reward(environments)

    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.chat_template = qwen3_chat_template
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    options = {"map": "4x4", "max_steps": 4}
    settings = GRPOConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=8, num_generations=8, learning_rate=1e-2,
        max_completion_length=1200, max_tool_calling_iterations=6, use_cpu=True, report_to=[], save_strategy="no",
        logging_steps=1, bf16=False,
    )  # fmt: skip
    data, play = Dataset.from_list(prompts("frozenlake", **options)), games("frozenlake", **options)
    how = {"processing_class": tokenizer, "train_dataset": data, "environment_factory": play, "reward_funcs": [last_q]}
    trainer = GRPOTrainer(model, args=settings, **how)
    trainer.train()
    first, second = [line for line in trainer.state.log_history if "reward" in line]
    assert first["tools/call_frequency"] > 1 and {"rewards/TextGame/mean", "rewards/last_q/mean"} <= second.keys()
    for line, q in zip((first, second), paid, strict=True):
        assert line["rewards/last_q/mean"] == pytest.approx(sum(q) / len(q), abs=1e-4) and len(set(q)) > 1
    assert any((weight != before[name]).any() for name, weight in model.named_parameters())


# ------------------------------------------------------------ OpenEnv's own client, several at once, on the real server

AROUND = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}  # a test stands in a folder of its own


@pytest.mark.slow
def test_clients_play_what_the_environment_plays(tmp_path):
    pytest.importorskip("openenv", reason="pip install -r requirements-integrations.txt")
    from openenv import GenericEnvClient

    env, expected = envs.make("alfworld"), []
    for task_id in env.task_ids("train")[:8]:
        text, _ = env.reset(options={"task_id": task_id})
        expected.append([(task_id, text, env.instruction)])
        expected[-1] += [(move, *env.step(move)[:3]) for _, move in env.expert(task_id)]
    command = [sys.executable, "-m", "integrations.openenv", "--env", "alfworld", "--run", str(tmp_path / "run")]
    with served(command, tmp_path / "log", **AROUND) as url:

        def episode(index: int) -> list:
            with GenericEnvClient(base_url=url).sync() as client:
                begun = client.reset(split="train", index=index).observation
                seen = [(client.state()["task_id"], begun["text"], begun["instruction"])]
                for move, *_ in expected[index][1:]:
                    result = client.step({"action": move})
                    seen.append((move, result.observation["text"], result.reward, result.done))
                with pytest.raises(Exception, match="the episode is over"):
                    client.step({"action": "look"})
                return seen

        with ThreadPoolExecutor(8) as pool:  # sessions side by side
            assert list(pool.map(episode, range(8))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alfworld", "webshop"])
def test_a_tree_grows_by_snapshots_from_another_process(tmp_path, name):
    """The page's example, until it has 200 forks: each page is what its path leads to here."""
    pytest.importorskip("openenv", reason="pip install -r requirements-integrations.txt")
    page = (Path(__file__).parents[1] / "docs" / "engines.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(from openenv .*?)```", page, re.S)
    command = [sys.executable, "-m", "integrations.openenv", "--env", name, "--run", str(tmp_path / "run")]
    names = {}
    with served(command, tmp_path / "log", **AROUND) as url:
        exec(example.replace("http://localhost:8000", url), names)
    tree, env = names["tree"], envs.make(name)
    assert len(tree) > 200
    for node in tree[1:]:
        path = [node]
        while path[0]["parent"]:
            path.insert(0, tree[path[0]["parent"]])
        env.reset(options={"task_id": env.task_ids("train")[0]})
        for step in path:
            text, reward, terminated, _, info = env.step(step["action"])
        expected = {"text": text, "reward": reward, "done": terminated, "valid_actions": info["valid_actions"]}
        assert {field: node[field] for field in expected} == expected


@pytest.fixture
def sessions(monkeypatch):
    """The server's door without OpenEnv: a function that opens a session, as the server does for each request."""
    pydantic = pytest.importorskip("pydantic")
    factory = {"create_app": lambda factory, *_, **__: factory, "Environment": type("Environment", (), {})}
    kinds = {name: pydantic.create_model(name, __config__={"extra": "allow"}) for name in ("Action", "State")}
    kinds["Observation"] = pydantic.create_model("Observation", reward=(float | None, None), done=(bool, False))
    server = type(sys)("openenv.core.env_server")
    vars(server).update(factory | kinds)
    for name, module in {"uvicorn": server, "openenv": server, "openenv.core": server, server.__name__: server}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "integrations.openenv", raising=False)
    door = importlib.import_module("integrations.openenv")
    door.HELD = 3
    monkeypatch.delitem(sys.modules, "integrations.openenv")
    return lambda env: door.application(env)


def test_a_session_trains_unless_a_request_asks_for_another_split_and_draws_by_its_seed(sessions):
    session, other = (sessions(Switches())() for _ in range(2))
    for asked, split in ({}, "train"), ({"split": "test"}, "test"), ({"index": 2}, "train"), ({}, "train"):
        session.reset(**asked)
        assert session.game.info["task_id"] in Switches().task_ids(split)
    with pytest.raises(UserError, match="not task"):
        session.reset(task="red")

    def drawn(door, **asked):
        door.reset(**asked)
        return door.game.info["task_id"]

    class Lazy(dict):
        def get(self, name):
            assert session.step.__globals__["ONE_AT_A_TIME"].lock()  # it may drive the engine
            return self[name]

    session.game.info = Lazy(session.game.info)
    assert session.state.valid_actions == session.env.valid_actions()
    for seed in range(20):
        tasks = [[drawn(door, seed=seed), drawn(door), drawn(door)] for door in (session, other)]
        assert tasks[0] == tasks[1] and len(set(tasks[0])) > 1


def test_a_reset_of_another_request_ends_no_episode(sessions):
    env = Switches()
    env.side_by_side = 1
    begin = sessions(env)
    first, other = begin(), begin()
    first.reset(task_id="red")
    with pytest.raises(UserError, match="1 episodes are open"):
        other.reset()
    other.close()
    first.close()
    assert begin().reset(task_id="red").text.startswith("Task: switch on red")


def test_snapshots_fork_and_are_bounded_and_freed(sessions):
    begin = sessions(Switches())
    first, fork = begin(), begin()
    first.reset(task_id="red")
    before = first.state.snapshot
    after = first.step(SimpleNamespace(action="switch red"))
    ids = [first.state.snapshot for _ in range(3)]
    with pytest.raises(UserError, match=f"no snapshot {before}: a session holds its last 3, until it closes"):
        fork.reset(snapshot=before)
    assert fork.reset(snapshot=ids[0]) == after and fork.state.step_count == 1
    assert fork.step(SimpleNamespace(action="done")).reward == 1.0 and not first.game.over
    assert first.reset(snapshot=fork.state.snapshot).done
    first.close()
    with pytest.raises(UserError, match="no snapshot"):
        fork.reset(snapshot=ids[0])


# --------------------------------------------------------------------- curves that follow a training's log from outside


def log_of(folder, *steps):
    lines = [{"step": step, "seconds": 0.1, "loss": 1 / step, "lr": 0.1} for step in steps]
    if steps[-1] % 4 == 0:
        lines.append({"step": steps[-1], "epoch": steps[-1] // 4, "loss": 0.5, "held_out": {"mse": 0.25, "x": None}})
    (folder / "qnet.log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_each_step_is_handed_on_once_also_after_a_stop(tmp_path, monkeypatch):
    told = []
    write = lambda figures, step: told.append((step, figures))  # noqa: E731
    monkeypatch.setattr(trackers, "tracker_of", lambda name, folder, begun: write)
    for last in (3, 2, 4, 4):  # the second is a training that was resumed from step 2
        log_of(tmp_path, *range(1, last + 1))
        trackers.main([str(tmp_path)])
    assert [step for step, _ in told] == [1, 2, 3, 4, 4]
    assert told[0][1] == {"update/seconds": 0.1, "update/loss": 1.0, "update/lr": 0.1}
    assert told[-1][1] == {"epoch/epoch": 1, "epoch/loss": 0.5, "epoch/mse": 0.25}
    told.clear()
    trackers.main([str(tmp_path), "--to", "wandb"])  # which has had none of them
    assert [step for step, _ in told] == [1, 2, 3, 4, 4]
    told.clear()
    log = tmp_path / "qnet.log.jsonl"
    log.write_text(log.read_text().replace("1.0", "2.0", 1))  # begun again
    trackers.main([str(tmp_path)])
    assert [step for step, _ in told] == [1, 2, 3, 4, 4]


def test_a_run_without_a_log_is_told(tmp_path):
    with pytest.raises(UserError, match="no training has written a log"):
        trackers.main([str(tmp_path)])
