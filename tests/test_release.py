"""The authors' published format: random weights in it against its own formula, its prompt, its figures."""

import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from fakes import chat_tokenizer, refused, talk, tiny_lm, word_chat, write
from torch.nn.functional import linear

import q_search
from environments.alfworld.env import ALFWorldEnv
from experiments import qlass_evaluation
from integrations import qlass_release
from qlass.chat import Chat, Rendering
from qlass.files import read_jsonl

TOKENIZERS = ["llama-2 first", "llama-2 always", "llama-3"]  # SentencePiece adds a space to a text, or to each part
EXAMPLE = [{"role": "user", "content": "A room.\n\nYour task is to: look."}, {"from": "gpt", "content": "Action: go"}]
EXAMPLE += [{"role": "user", "content": "Observation: a"}, {"from": "gpt", "content": "Thought: hm\nAction: look"}]


def publish(name, folder):
    """Random weights in the release's layout: folder/Q and folder/agent."""
    tokenizer = chat_tokenizer(*name.split(), begins=True)
    llama = tiny_lm(word_chat(), 5, vocab_size=400, tie_word_embeddings=False).bfloat16()
    llama.save_pretrained(folder / "agent")
    llama.config.save_pretrained(folder / "Q")
    for place in ("agent", "Q"):
        tokenizer.save_pretrained(folder / place)
    sizes = {"mlp.0.weight": (1024, 32), "mlp.0.bias": (1024,), "mlp.2.weight": (1024, 1024), "mlp.2.bias": (1024,)}
    head = {key: torch.randn(size).mul(0.1) for key, size in (sizes | {"mlp.4.weight": (1, 1024)}).items()}
    weights = {f"llama.{key}": weight for key, weight in llama.state_dict().items()} | head
    torch.save({key: weight.bfloat16() for key, weight in weights.items()}, folder / "Q" / "pytorch_model.bin")
    return folder


@pytest.fixture(scope="module", params=TOKENIZERS)
def release(request, tmp_path_factory):
    folder = publish(request.param, tmp_path_factory.mktemp("release"))
    qlass_release.main(f"{folder}/Q --sft {folder}/agent --out {folder}/run/qnet".split())
    return request.param, folder


def written(name, messages):
    """The text that the release writes of messages."""
    text = ""
    for message in messages:
        if name == "llama-3":
            text += f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n{message['content']}<|eot_id|>"
        elif message["role"] == "user":
            text += f"[INST] {message['content']} [/INST]"
        else:
            text += f"{message['content']} </s><s>"
    return text


def value(name, folder, messages):
    """Q of the last message by the release's formula, without any of our code."""
    weights = torch.load(folder / "Q" / "pytorch_model.bin", weights_only=True)
    weights = {key: weight.float() for key, weight in weights.items()}
    llama = hf.LlamaForCausalLM(hf.LlamaConfig.from_pretrained(folder / "Q", dtype="float32"))
    llama.load_state_dict({key[6:]: weight for key, weight in weights.items() if key.startswith("llama.")})
    ids = chat_tokenizer(*name.split(), begins=True)(written(name, messages), return_tensors="pt").input_ids
    with torch.no_grad():
        hidden = llama(ids, output_hidden_states=True).hidden_states[-1][0, -2]
        for layer in ("mlp.0", "mlp.2"):
            hidden = linear(hidden, weights[f"{layer}.weight"], weights[f"{layer}.bias"]).relu()
        return linear(hidden, weights["mlp.4.weight"]).item()


def test_the_agent_reads_the_releases_text_and_has_its_settings(release):
    name, folder = release
    chat = Chat(hf.AutoTokenizer.from_pretrained(folder / "run" / "sft"), Rendering.load(folder / "run" / "sft"))
    state = talk("Walk.", opening=0).extended("Action: look", "Observation: a desk 1")
    asked = written(name, state.dump()) + "<|start_header_id|>assistant<|end_header_id|>\n\n" * (name == "llama-3")
    assert chat.prompt(state) == chat_tokenizer(*name.split(), begins=True)(asked).input_ids
    assert (chat.rendering.temperature, chat.rendering.max_new_tokens) == (0.7, 512)
    assert not chat.rendering.stop


def prompt_files():
    Path("inst.txt").write_text("You act.\n\nAction: <your next action>")
    write("icl.json", [[EXAMPLE, EXAMPLE]])
    return "--env-option instruction=inst.txt --env-option example=icl.json"


OPENING = (
    "You act.\n\nAction: <your next action>\n---\nHere is an example.\n\nA room.\n\nYour task is to: look.\n"
    "Action: go\nObservation: a\n\nThought: hm\nAction: look\n\n---\nNow, it's your turn and here is the task.\n"
)


def test_search_by_the_published_weights(release, made):
    """Whole, by its flags: each candidate's value in the lines is the formula's of the text that the lines tell."""
    name, folder = release
    world = f"--env experiments.qlass_evaluation:ALFWorld {prompt_files()} --env-option data={made}"
    flags = f"--run {folder}/run --split valid_seen --limit 1 --overwrite --max-steps 3 --max-new-tokens 8"
    q_search.main(f"{world} {flags}".split())
    [line] = read_jsonl(folder / "run" / "results.jsonl")
    env = ALFWorldEnv(made)
    observation, _ = env.reset(options={"task_id": line["task_id"]})
    assert observation.count("\n\n") == 1
    messages = [{"role": "user", "content": OPENING + observation.replace("\n\n", "\n")}]
    differ = 0
    for step in line["steps"]:
        for candidate in step["candidates"]:
            turn = {"role": "assistant", "content": candidate["action"]}
            expected = value(name, folder, [*messages, turn])
            assert candidate["q"] == pytest.approx(expected, abs=1e-4 * max(1, abs(expected)))
        differ += len(step["candidates"]) == 2
        messages += [{"role": "assistant", "content": step["action"]}, {"role": "user", "content": step["observation"]}]
    assert line["n_steps"] == 3 and differ


class Bomb(str):
    """Who unpickles it makes a folder of this name."""

    def __reduce__(self):
        return os.mkdir, (str(self),)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.update({"mlp.6.weight": torch.ones(1)}), 'Unexpected key.*"mlp.6.weight"'),
        (lambda w: w.update({"mlp.0.weight": torch.ones(8, 32)}), "size mismatch for mlp.0.weight"),
        (lambda w: w.update({"mlp.0.bias": Bomb("struck")}), "Weights only load failed"),
    ],
)
def test_what_is_no_qnet_of_the_release_is_refused_by_key(change, reason):
    file = publish("llama-3", Path("release")) / "Q" / "pytorch_model.bin"
    weights = torch.load(file)
    change(weights)
    torch.save(weights, file)
    with refused(f"^{file}.*{reason}"):
        qlass_release.main(["release/Q", "--sft", "release/agent", "--out", "run/qnet"])
    assert not Path("run/qnet").exists() and not Path("struck").exists()


def test_a_stopped_conversion_leaves_nothing_that_would_be_refused():
    publish("llama-3", Path("release"))
    argv = ["release/Q", "--sft", "release/agent", "--out", "run/qnet"]
    full = OSError("No space left on device")
    with patch.object(hf.LlamaForCausalLM, "save_pretrained", side_effect=full), refused("No space left"):
        qlass_release.main(argv)
    qlass_release.main(argv)


def test_figures_of_three_episodes(capsys):
    wins = {"a/1": "101", "a/2": "011", "b/1": "010", "c/1": "000"}  # in three episodes
    for episode in range(3):
        lines = [
            {"task_id": task, "env": "alfworld", "method": "qlass", "reward": float(text[episode]),
             "success": text[episode] == "1", "tokens": {}, "block": task[0]}
            for task, text in wins.items()
        ]  # fmt: skip
        write(f"results-{episode}.jsonl", lines)
    Path("results-0.jsonl").rename("results-9.jsonl")  # the first that is named, whatever its name
    qlass_evaluation.main([f"results-{episode}.jsonl" for episode in (9, 1, 2)])
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.startswith("| success [95 %] | games | first | at least two of 3 | any of 3 (oracle) |")
    means = [cell for cell in re.split(r" \[[^]]*\] | ?\| ?", row) if cell]
    assert means == ["QLASS", "4", "0.250", "0.500", "0.750"]
