"""Fakes for the tests: a world whose tree is written out, tokenizers, models with random weights, servers."""

import asyncio
import contextlib
import functools
import gzip
import itertools
import json
import math
import multiprocessing
import operator
import os
import re
import selectors
import shlex
import socket
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import bellman
import envs
from build_trees import Explorer
from qlass import UserError, settings
from qlass.batching import Candidate
from qlass.chat import Chat, Rendering
from qlass.files import read_jsonl
from qlass.messages import State, parse_action, react, start
from qlass.models import PROBE
from qlass.trees import tree_records

ROOT = Path(__file__).parents[1]

# A node of a world is {action: node}, a leaf its final reward. Two steps lead to the first purse, three to the second.

WORLD = {
    "left": {"left": 0.0, "right": {"left": 0.5, "right": 0.2}},
    "right": {"left": 0.4, "right": {"left": 0.0, "right": 1.0}},
}
# Some begin alike, so that a trie of them forks late.
ACTIONS = (
    "Action: left",
    "Action: right",
    "Action: left right",
    "Thought: hm Action: walk",
    "Thought: hm Action: left",
)


class FakeEnv(envs.TextEnv):
    """A deterministic world that is a tree: the state is the path, an action leads down an edge, a leaf pays."""

    name = "fake"
    instruction = "walk"
    tree_depth, max_steps, side_by_side = 2, 5, 64
    task = "find the purse"

    def __init__(self, world=WORLD, **options):
        super().__init__()
        vars(self).update(options)
        self.world, self.played = world, []  # `played`: every step, shared by all forks
        self.path = ()

    @property
    def here(self):
        return functools.reduce(operator.getitem, self.path, self.world)

    def task_ids(self, split):
        return self.split_ids(split)

    def split_ids(self, split):
        return {split: [f"{split}{i}" for i in range(6)] for split in ("train", "val", "test")}[split]

    def begin(self, task_id):
        self.path = ()
        return self._look()

    def act(self, action):
        self.played.append((self.task_id, *self.path, action))
        known = action in self.here
        self.path += (action,) * known
        ended = not isinstance(self.here, dict)
        return self._look() if known else "nothing happens", float(self.here) if ended else 0.0, ended

    def _look(self):
        return " ".join(("you", "stand", "at", "start", *self.path))

    def valid_actions(self):
        return list(self.here) if isinstance(self.here, dict) else []

    def save(self):
        return self.path

    def load(self, saved):
        self.path = saved

    def optimal_value(self, gamma=0.99):
        return best(self.here, gamma)

    def expert(self, task_id):
        while self.valid_actions():
            action = max(self.here, key=lambda a: best(self.here[a]))
            yield "this way", action

    def rules(self):
        goes = iter(lambda: "left" in self.valid_actions(), False)
        return {"always left": lambda: (("to the left", "left") for _ in goes)}


def best(node, gamma=1.0):
    """The best purse below, discounted by the steps to it."""
    return gamma * max(best(child, gamma) for child in node.values()) if isinstance(node, dict) else node


FIRST = start(FakeEnv(), "train0")


def reverse(node):
    """The same world, in which the best leaf is the worst."""
    return {action: reverse(below) for action, below in node.items()} if isinstance(node, dict) else 1 - node


def explore(
    env, task_id, rendering, depth=1, width=2, rollouts=64, with_expert=False, prune="branch", expert=None, steps=None
):
    """Algorithm 2 as build_trees.py calls it; 0 rollouts are any. expert: demonstrations by task."""
    explorer = Explorer(env, task_id, rendering, depth, width, rollouts or math.inf, steps or env.max_steps, prune)
    return explorer.explore(expert or {} if expert or with_expert else None)


def run(player, answer):
    """Play a coroutine to its end: what it returns, and all requests that it made."""
    requests, reply = [], None
    while True:
        try:
            requests.append(player.send(reply))
        except StopIteration as stop:
            return stop.value, requests
        reply = answer(requests[-1])


def talk(*texts, task="", opening=2):
    """A state of these messages, of which the user has the first."""
    return State(tuple(zip(itertools.cycle(("user", "assistant")), texts, strict=False)), task, opening)


def actions_of(record):
    """The executable actions of a line of results.jsonl."""
    return tuple(parse_action(step["action"]) for step in record["steps"])


def path_of(state):
    """The actions that led to a state."""
    return tuple(parse_action(content) for role, content in state.messages[2:] if role == "assistant")


def true_q(request):
    """The best purse behind each action: what a perfect QNet says (gamma = 1)."""
    node = functools.reduce(dict.get, path_of(request.state), WORLD)
    return [best(node[parse_action(action)]) for action in request.actions]


def say(*actions):
    return [Candidate(react("hm", action), 3, -1.0) for action in actions]


class Script:
    """Answers Sample requests from {path: actions}: the actions of a state in turn, from the start again at the end."""

    def __init__(self, script, otherwise="left"):
        self.actions = defaultdict(lambda: itertools.cycle(otherwise.split()))
        for path, actions in script.items():
            self.actions[path] = itertools.cycle(actions.split())

    def __call__(self, request):
        return say(*itertools.islice(self.actions[path_of(request.state)], request.n))


# ------------------------------------------------------------------------------------------------ trees as records


def node(node_id, parent, reward=0.0, branch=0, done=False, **more):
    about = {"task_id": "t", "depth": 0, "action": f"Action: {node_id}", "observation": f"saw {node_id}"}
    about |= {"source": "policy", "expert": False}
    return about | {"node_id": node_id, "parent_id": parent, "reward": reward, "branch": branch, "done": done} | more


def tree_by_hand():
    """0 has the children 1 and 4; 1 has 2 and 3. Three branches: 1 2, then 4, then 3."""
    return [
        node(0, None, nodes=5, messages=[{"role": "user", "content": "go"}], task=""),
        node(1, 0, branch=1),
        node(2, 1, 1.0, branch=1, done=True),
        node(3, 1, 0.5, branch=3, done=True),
        node(4, 0, 0.2, branch=2, done=True),
    ]


def labelled_tree(task="train0"):
    """A tree of the fake world, explored in all directions, with q."""
    directions = iter(["left", "right", "right", "left", "right", "left", "left", "right"] * 20)
    tree = explore(FakeEnv(), task, Rendering(), 2, 3, 20, True)
    root, _ = run(tree, lambda request: say(*(next(directions) for _ in range(request.n))))
    nodes = tree_records(FakeEnv(), task, root, [])
    del nodes[0]["env"]  # stages play the fake world by any name
    return bellman.label(nodes, bellman.q_values(nodes, 0.9))


# ------------------------------------------------------------------------------------------------------ tokenizers


LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% set turn = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim"
    " + '<|eot_id|>' %}{{ bos_token + turn if loop.first else turn }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEMPLATES = {  # template, special tokens, other special ones
    "llama-2": (LLAMA_2, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, []),
    "chatml": (CHATML, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, ["<|im_start|>"]),
    "llama-3": (
        LLAMA_3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},  # neither ends a turn
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    ),
    "gemma": (GEMMA, {"bos_token": "<bos>", "eos_token": "<eos>"}, ["<start_of_turn>", "<end_of_turn>"]),
}


def chat_tokenizer(name, scheme=None, begins=False):
    """A tokenizer with a real model's template: "llama-2", of characters as SentencePiece's, which writes a space as
    a part of the next word; "chatml", "llama-3" and "gemma", of single bytes.

    scheme: where SentencePiece adds a space. begins: each text begins with the first token, as in published ones.
    """
    template, named, others = TEMPLATES[name]
    core = of_characters(scheme) if name == "llama-2" else of_bytes()
    core.add_special_tokens([AddedToken(token, special=True) for token in others])
    if name == "gemma":
        core.add_tokens([AddedToken(token, normalized=False) for token in ("\n", "\n\n", "  ")])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **named)
    if begins:
        bos, token = tokenizer.bos_token, tokenizer.bos_token_id
        begin = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, token)])
        tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.chat_template = template
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def of_characters(scheme):
    letters = [*map(chr, range(33, 127))]
    characters = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *letters]
    vocabulary = {c: i for i, c in enumerate(characters)}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if scheme:
        core.normalizer = normalizers.Sequence([])
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return core


def of_bytes():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


WORDS = "you stand at start left right walk find the purse hm this way OK nothing happens Thought: Action: Observation:"


def word_chat(**rendering):
    """A chat of whole words, so that tokens can be counted by hand: "Thought: hm Action: left <end>" are five of them.

    A user's turn costs its words and two more, for <user> and <agent>.
    """
    words = ["<pad>", "<end>", "<unk>", "<user>", "<agent>", *WORDS.split()]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.add_tokens(["<user>", "<agent>", PROBE])  # nothing else has a "<"
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("<", "isolated"), pre_tokenizers.WhitespaceSplit()]
    )
    lines = [decoders.WordPiece("##", cleanup=False), decoders.Fuse(), decoders.Replace(" Action:", "\nAction:")]
    core.decoder = decoders.Sequence(lines)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<user> ' + m.content + ' <agent> ' }}"
        "{% else %}{{ m.content + ' <end> ' }}{% endif %}{% endfor %}"
    )
    return Chat(tokenizer, Rendering(**{"max_new_tokens": 12, "stop": ()} | rendering))


def tiny_lm(chat, seed=0, **options):
    """Two layers of 32 with grouped keys; weights large enough that what differs in the input differs in the output."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{"vocab_size": len(chat.tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
           "tie_word_embeddings": True, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None,
           "eos_token_id": 1} | options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gradients(model, loss):
    return torch.autograd.grad(loss, [*model.parameters()])


def tiny_backbone(chat, seed=0):
    return tiny_lm(chat, seed).model


SMALL = {  # what makes a config small, where it has such a field
    "vocab_size": 200, "hidden_size": 64, "n_embd": 64, "intermediate_size": 64, "ffn_dim": 64, "num_hidden_layers": 4,
    "n_layer": 4, "num_layers": 4, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "num_local_experts": 4, "num_experts_per_tok": 2, "word_embed_proj_dim": 64,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "sliding_window": 64,
}  # fmt: skip
SWA, FULL = "sliding_attention", "full_attention"
KINDS = {  # by model type: what its config needs besides
    "llama4_text": {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 64},  # chunks
    "gemma3_text": {"layer_types": [SWA, FULL] * 2},
    "gemma4_text": {"layer_types": [SWA, FULL] * 2, "num_kv_shared_layers": 2, "global_head_dim": 16},
    "gpt_oss": {"layer_types": [SWA, FULL] * 2},  # experts too
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4, "num_heads": 4},
    "rwkv": {"num_hidden_layers": 8, "attention_hidden_size": 64},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4},
}


def tiny(name):
    """A small model of random weights, by its model type."""
    kind = type(transformers.AutoConfig.for_model(name))
    known = kind().to_dict()
    torch.manual_seed(0)
    config = kind(**{k: v for k, v in SMALL.items() if k in known} | KINDS.get(name, {}))
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def log_pi(next_token, ids, valid):
    """Of one of the valid actions: token by token, among those with which one can go on. next_token: its logits."""
    total = torch.zeros(())
    for t, token in enumerate(ids):
        allowed = sorted({w[t] for w in valid if w[:t] == ids[:t]})
        total = total + next_token(ids[:t])[allowed].log_softmax(-1)[allowed.index(token)]
    return total


def save_agent(folder, seed=0, options=(), **rendering):
    """A checkpoint of an agent with random weights that knows the words of the fake world. options: the model's."""
    chat = word_chat(**rendering)
    tiny_lm(chat, seed, **dict(options)).save_pretrained(folder)
    chat.save(folder)
    return folder


def write(path, records):
    """Each record as JSON on a line of its own."""
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


def without_seconds(path):
    """The lines of a file but for their seconds."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_jsonl(path)]


def code_on(page, word):
    """The code on a page of docs/ that has this word."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.S)
    (code,) = (block for block in blocks if word in block)
    return code


def fork(main, argv, folder=Path(), **env):
    """A stage in a process of its own, to be killed or run beside others."""

    def stage():
        os.chdir(folder)
        os.environ |= env
        main(argv)

    process = multiprocessing.get_context("fork").Process(target=stage, daemon=True)
    process.start()
    return process


def over(usual, more):
    """The words of the usual flags but for those that `more` has, and of `more`."""
    words, flags = shlex.split(more), map(str.split, re.split(" (?=--)", usual))
    return [*itertools.chain(*(flag for flag in flags if flag[0] not in words)), *words]


@contextlib.contextmanager
def refused(says):
    """A block that ends in a UserError of one line, in which the pattern is found."""
    with pytest.raises(UserError, match=says) as error:
        yield error
    assert "\n" not in str(error.value)


def settings_of(stage, flags=""):
    """The Config of a stage or an experiment, a module, as these flags set it."""
    return settings.read_settings(stage.Config, stage.__doc__, shlex.split(flags))


# ---------------------------------------------------------------------------------------- recordings of WebShop

SHARED = Path(os.environ.get("QLASS_SHARED", ROOT.parent / "shared")) / "webshop"
HAS_RECORDINGS = (SHARED / "golden.jsonl.gz").is_file() and (SHARED.parent / "alfworld").is_dir()
recorded = pytest.mark.skipif(not HAS_RECORDINGS, reason="the recordings of the original engine are not here")


def lines(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def real_shop(human=False, **options):
    files = {"data": SHARED, "title_nouns": SHARED / "title_nouns_standin.json.gz"}
    return envs.make("webshop", **files, human_goals=human, max_steps=None, **options)


# --------------------------------------------------------------------------------- an OpenAI-compatible server


def reply(choice, *more, read, written):
    """A reply of one choice or several, and the tokens that it counts."""
    usage = {"prompt_tokens": read, "completion_tokens": written}
    return {"model": "first", "usage": usage, "choices": [choice, *more]}


def completion(text, end="stop", read=0, written=3, **more):
    """A reply to completions. more: of the choice, as prompt_logprobs."""
    return reply({"text": text, "finish_reason": end} | more, read=read, written=written)


def chat_completion(*contents, read=0, end="stop"):
    """A reply to chat completions, whose tokens are words."""
    written = sum(len((content or "").split()) for content in contents)
    choices = [{"message": {"role": "assistant", "content": content}, "finish_reason": end} for content in contents]
    return reply(*choices, read=read, written=written)


class FakeServer:
    """What answers on a fake server: completions of token ids with the log-probabilities of a prompt, chat
    completions, embeddings.

        with FakeServer(model, qnet) as server: ... server.url ...

    model, qnet: whose log-probabilities and values it tells. Answers of another kind have `text`, a format of the
    request's seed and of a move that depends on it. script: what answers the next requests instead, each a status
    (503; 0 resets the connection), with the seconds of Retry-After or without, a reply, bytes, or a function that gives
    one of these for the body. seen: all bodies that were posted. connections: of all requests.
    pause: seconds that each request takes. most: requests at once.
    """

    def __init__(self, model=None, qnet=None, text="Action: left {seed}"):
        self.model, self.qnet, self.text = model, qnet, text
        self.script = []
        self.seen = []
        self.connections = []
        self.pause, self.most = 0.0, 0
        self.open = set()

    def __enter__(self):
        handler = type("Fake", (Handler,), {"fake": self})
        kind = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 128})  # of 5 it resets others
        self.server = kind(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.url = f"{self.address}#first"
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, body):
        """Status, seconds of Retry-After, and what is sent."""
        self.seen.append(body)
        turn = self.script.pop(0) if self.script else self.well
        turn = turn(body) if callable(turn) else turn
        if isinstance(turn, bytes):
            return 200, 0, turn
        if isinstance(turn, int):
            turn = turn, 0
        if isinstance(turn, tuple):
            return *turn, json.dumps({"error": {"message": "not now"}}).encode()
        return 200, 0, json.dumps(turn).encode()

    def well(self, body):
        """A reply with which nothing is wrong."""
        if "input" in body:
            return self.embeddings(body)
        if "prompt_logprobs" in body:
            return self.prompt_logprobs(body)
        seeds = [body.get("seed", 0) + k for k in range(body.get("n", 1))]  # as vLLM's
        texts = [self.text.format(seed=seed, move=("left", "right")[seed % 2]) for seed in seeds]
        if "messages" in body:
            words = sum(len(message["content"].split()) for message in body["messages"])
            return chat_completion(*texts, read=words)
        return completion(*texts, read=len(body["prompt"]))

    @torch.inference_mode()
    def prompt_logprobs(self, body):
        """As vLLM tells them: of each token but the first."""
        logits = self.model(input_ids=torch.tensor([body["prompt"]])).logits[0]
        told = [None]
        for token, row in zip(body["prompt"][1:], logits.log_softmax(-1), strict=False):
            told.append({str(token): {"logprob": float(row[token])}})
        return completion("x", "length", len(told), 1, prompt_logprobs=told)

    @torch.inference_mode()
    def embeddings(self, body):
        """A QNet's value at each text's last token, the last text first."""
        entries = []
        for index, ids in enumerate(body["input"]):
            value = float(self.qnet(input_ids=torch.tensor([ids]))[0, -1])
            entries.append({"object": "embedding", "index": index, "embedding": [value]})
        usage = {"prompt_tokens": sum(map(len, body["input"]))}
        return {"object": "list", "data": entries[::-1], "model": body["model"], "usage": usage}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.fake.connections.append(self.connection)
        self.fake.open.add(self)
        self.fake.most = max(self.fake.most, len(self.fake.open))
        time.sleep(self.fake.pause)
        status, seconds, data = self.fake.answer(json.loads(body))
        self.fake.open.remove(self)
        if not status:
            return self.connection.shutdown(socket.SHUT_RDWR)
        self.send_response(status)
        if seconds:
            self.send_header("Retry-After", str(seconds))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class FastLoop(asyncio.SelectorEventLoop):
    """An event loop on a shortened clock: timeouts and pauses of `speed` seconds last one."""

    def __init__(self, speed):
        self.speed, waits = speed, selectors.DefaultSelector()
        select = waits.select
        waits.select = lambda timeout=None: select(timeout and timeout / self.speed)
        super().__init__(waits)

    def time(self):
        return super().time() * self.speed


def free_port():
    """A port below those that systems give to others."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):  # where it is in use
            free.bind(("127.0.0.1", 20000 + int.from_bytes(os.urandom(2)) % 12000))
            return str(free.getsockname()[1])
