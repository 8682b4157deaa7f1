"""States, actions, marks and how they become tokens under the chat templates of real model families."""

from contextlib import nullcontext

import pytest
from fakes import SENTENCE_PIECE, TEMPLATES, chat_tokenizer, tiny_backbone, tiny_lm, word_chat
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from qlass import UserError
from qlass.batching import LogProb, Sample, Score
from qlass.chat import Chat, Rendering
from qlass.fast.decode import FastPolicy
from qlass.fast.packing import pack_pairs
from qlass.files import warn_once
from qlass.messages import State, parse_action, react, uniforms
from qlass.policy import Policy
from qlass.published import Demonstration, refuse_second_thoughts
from qlass.tiny import MARK, mark, sentence
from train_qnet import Pair, QNet, scorer

CHATML = TEMPLATES["chatml"][0]
CHATS = {name: Chat(chat_tokenizer(name), Rendering()) for name in TEMPLATES}
MARKING = Chat(chat_tokenizer("chatml"), Rendering(mark_matches=True, compact=True))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Thought: I look.\nAction:   click[Buy Now] \n", "click[Buy Now]"),  # capitals count, as in the engines
        ("Thought: no action here", "Thought: no action here"),  # goes to the environment as it is
        ("Thought: x\nAction: search[Action: movies]", "search[Action: movies]"),
        ("Action: left\nbut look", "left\nbut look"),  # as in the released code
        # A thought may hold "Action:", wherever it thinks.
        ("Thought: Action: left is a hole.\nAction: right", "right"),
        ("Thought: no Action: left, but Action: right", "right"),
        ("<think>\nAction: left?\n</think>\n\nThought: no\nAction: right", "right"),
        ("so Action: left?\n</think>\nright<think>Action: left", "right"),  # the prompt began it
        ("<think>Action: left, but", ""),
        ("<thought>\nAction: left?\n</thought>\nright", "right"),
        ("<reasoning>\nAction: left?\n</reasoning>\n<answer>", "<answer>"),
        ("<seed:think>\nAction: left?</seed:think>Action: right", "right"),
        ("◁think▷\nAction: left?◁/think▷right", "right"),
        ("[THINK]Action: left", ""),
        ("search[thought] <b>", "search[thought] <b>"),
    ],
)
def test_the_executable_part_of_an_action(text, action):
    assert parse_action(text) == action


@given(st.text(alphabet="ab :\n", max_size=20), st.text(alphabet="ab []", max_size=20))
def test_what_react_writes_parse_action_reads(thought, action):
    assert parse_action(react(thought, action)) == action.strip()


def test_noise_depends_on_its_key_alone():
    keys = [(0, "task", 1), (1, "task", 1), (0, "task", 2), (0, "task1", 1), (0, "task", "1")]
    noise = [uniforms(5, *key) for key in keys]
    assert len({a[0] for a in noise}) == len(keys) and all(((a >= 0) & (a < 1)).all() for a in noise)
    assert (uniforms(3, *keys[0]) == noise[0][:3]).all()


PRICES = "a red hat, and price lower than 60.00 dollars"


@pytest.mark.parametrize(
    ("task", "marked"),
    [
        ("a red shirt", "✓red cotton✓ shirt"),
        ("a red t-shirt and", "✓Red, shirts and a✓ T-shirt."),
        ("size 8.5", "✓size✓ 8.5 or 8"),
        ("is it for me", "is it for me"),  # words that every task has say nothing
        (PRICES, "✓red✓ hat [SEP] $60.5 [SEP]✓ $5.0 to $95.5"),  # within its limit
        # With its place on the page, before the place, which is what the agent has to choose first.
        (PRICES, "Thought:✓ 3 $60.0✓ red✓ hat"),
        (PRICES, "Thought: 1 $60.5 to $70.0✓ hat"),
        ("a red hat", "$5.0 for 5.0"),
    ],
)
def test_words_of_the_task_and_prices_within_its_limit_are_marked(task, marked):
    assert mark(marked.replace(MARK, ""), task) == marked


@given(st.text(alphabet="ab- .,[]\n'8", max_size=40), st.text(alphabet="ab -'8", max_size=12))
def test_marks_come_off_again(text, task):
    assert MARKING.aids.unmark(mark(text, task)) == text


def chat_of(template: str, **rendering: object) -> Chat:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = template
    return Chat(tokenizer, Rendering(**rendering))


STATE = State((("user", "walk"), ("assistant", "OK"), ("user", "you see a door"))).then(
    "Thought: hm\nAction: open it", "Observation: it is shut"
)
SYSTEM = State((("system", "be brief"), *STATE.messages), STATE.task)
ENDS = {"llama-2": "</s>", "zephyr": "</s>", "chatml": "<|im_end|>", "chatml-system": "<|im_end|>",
        "llama-3": "<|eot_id|>", "mistral": "</s>"}  # fmt: skip


@pytest.mark.parametrize("scheme", [None, "first", "always", "never"])
@pytest.mark.parametrize("name", [n for n in TEMPLATES if n != "none"])
def test_a_state_reads_as_the_models_own_template_writes_it(name, scheme):
    """Also where SentencePiece adds a space at a text's beginning, after each control token, or nowhere."""
    tokenizer = chat_tokenizer(name, scheme)
    chat = Chat(tokenizer, Rendering())
    written = tokenizer.apply_chat_template(STATE.dump(), tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(chat.prompt(STATE)).replace("s> ", "s>").strip() == written.strip()
    # The tokens are those of the whole text, up to the one that ends the turn: nothing depends on where runs are cut.
    written = tokenizer.apply_chat_template(STATE.then("Action: push", "").dump()[:-1], tokenize=False).strip()
    ids = [*chat.prompt(STATE), *chat.action("Action: push", "")]
    assert tokenizer(written, add_special_tokens=False).input_ids[: len(ids)] == ids
    assert tokenizer.convert_ids_to_tokens(ids[-1]) == ENDS[name] and ids[-1] == chat.stop_id


def test_a_token_that_takes_the_space_before_it_leaves_the_prompt_as_it_is():
    tokenizer = chat_tokenizer("chatml")
    tokenizer.add_tokens([AddedToken("[SEP]", lstrip=True)])
    chat = Chat(tokenizer, Rendering())
    assert chat.action("[SEP] a", "") == [*tokenizer("[SEP] a", add_special_tokens=False).input_ids, chat.stop_id]


def test_without_a_template_roles_are_words_and_a_prompt_begins_as_the_tokenizer_begins_a_text():
    chat, end = CHATS["none"], "<|endoftext|>"
    assert chat.tokenizer.decode([*chat.prompt(STATE), *chat.action("Action: push", "")]) == (
        f"User: walk\nAssistant: OK{end}\nUser: you see a door\nAssistant: Thought: hm\nAction: open it{end}\n"
        f"User: Observation: it is shut\nAssistant: Action: push{end}"
    )
    for template in (None, TEMPLATES["llama-3"][0]):  # which has its own
        tokenizer = chat_tokenizer("llama-3", begins=True)
        tokenizer.chat_template = template
        for state in (STATE, SYSTEM):
            ids = Chat(tokenizer, Rendering()).prompt(state)
            assert ids[0] == tokenizer.bos_token_id and ids.count(ids[0]) == 1


texts = st.text(alphabet="ab [].:✓é\n", min_size=1, max_size=12).map(lambda s: s.strip() or "a")
chats = st.sampled_from([*CHATS.values(), MARKING, word_chat(), word_chat(compact=True)])


@settings(max_examples=80)
@given(chats, texts, st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_the_tokens_of_a_state_begin_those_of_every_later_state(chat, task, turns):
    state = State((("user", "walk"), ("assistant", "OK"), ("user", "a door")), task)
    for action, observation in turns:
        pair = [*chat.prompt(state), *chat.action(action, task)]
        state = state.then(action, observation)
        assert chat.prompt(state)[: len(pair)] == pair


@given(st.sampled_from([MARKING, *(c for n, c in CHATS.items() if n not in SENTENCE_PIECE)]), texts, texts)
def test_an_action_comes_back_from_its_tokens(chat, action, task):
    if chat is MARKING:
        action = action.replace(MARK, "a")
    ids = chat.action(action, task)
    assert ids.index(chat.stop_id) == len(ids) - 1
    for wrote in (ids, [*ids, 5, 6], ids[:-1]):  # what comes after the end is none of it; cut by the limit of tokens
        assert chat.text(wrote) == action


def test_the_compact_form_by_hand():
    first = State((("user", "walk"), ("assistant", "OK"), ("user", "page one: red door; none")), "red door")
    state = first.then("Action: go", "page one: red door; or hall").then("Action: go", "page one: red door; or hall")
    first, _, second, _, third = (MARKING.tokenizer.decode(run) for run in MARKING.message_tokens(state))
    assert "user\npage one: red door; none<" in first  # no instruction, no OK
    assert "page one: ; or hall<" in second  # not the task again
    assert "(same page)" in third and "hall" not in third


@pytest.mark.parametrize(
    ("task", "first", "page", "left"),
    [
        ("red", "Task: red. All is off.", "On: red.", "On: red."),
        ("red", "Task: red. All is off.", "Task: red.", "Task: ."),
        ("red", "Task: red. All is off.", "Task: reddish. Task: red, blue.", "Task: reddish. Task: red, blue."),
        ("buy it", "Shop [SEP] buy it [SEP] Search", "[SEP] buy it [SEP] buy it now", "[SEP]  [SEP] buy it now"),
        ("a (b). ", "Room.\n\nYour task is to: a (b).", "Your task is to: a (b).", "Your task is to: "),
        ("go", "go", "go", ""),
        ("go", "where to?", "go", "go"),  # it is not said at first
        ("", "Task: red.", "On: red.", "On: red."),
    ],
)
def test_the_tasks_sentence_is_taken_out_where_a_page_says_it_as_at_first(task, first, page, left):
    again = sentence(task, first)
    assert (again.sub("", page) if again else page) == left


CONTROL = sorted({token for _, named, others in TEMPLATES.values() for token in (*named.values(), *others)})


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("control", CONTROL)
def test_control_tokens_in_a_message_stay_text(name, control):
    chat, page = CHATS[name], f"see {control} and {control}"
    special = {i for i, t in chat.tokenizer.added_tokens_decoder.items() if t.special}
    *ids, end = chat.action(page, "")
    assert special.isdisjoint(ids) and end == chat.stop_id
    assert chat.text(ids) == page or name in SENTENCE_PIECE  # its decoder drops spaces
    observed, other = (chat.prompt(State((("user", text),))) for text in (page, "see it"))
    assert page.replace(" ", "") in chat.tokenizer.decode(observed).replace(" ", "")
    assert [i for i in observed if i in special] == [i for i in other if i in special]  # the template's own
    if chat.template.system:
        observed, other = (chat.prompt(State((("system", text), ("user", "see it")))) for text in (page, "see it"))
        assert [i for i in observed if i in special] == [i for i in other if i in special]


def test_a_templates_date_is_that_of_the_checkpoint_or_the_same_every_day():
    template = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}" + CHATML
    chat = chat_of(template, date="2024-07-26")
    assert chat.tokenizer.decode(chat.prompt(STATE)).startswith("Today: 26 Jul 2024\n")
    assert chat_of(template).rendering.date == "2025-01-01"


def test_system_messages_and_spaces_at_a_messages_ends():
    spaced = State(tuple((role, f"\n{content} \n") for role, content in SYSTEM.messages))
    for words in ("m.content", "' ' + m.content.strip() + ' '"):
        chat = chat_of(CHATML.replace("m.content", words))
        written = chat.tokenizer.apply_chat_template(SYSTEM.dump(), tokenize=False, add_generation_prompt=True)
        assert chat.tokenizer.decode(chat.prompt(SYSTEM)) == chat.tokenizer.decode(chat.prompt(spaced)) == written
    chat = CHATS["chatml"]
    assert len(chat.message_tokens(SYSTEM)) == len(chat.message_tokens(STATE))  # one list with the first user's
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    for template in (refuses + CHATML, CHATML.replace("in messages", "in messages if m.role != 'system'")):
        other = chat_of(template)
        assert other.prompt(STATE) == chat.prompt(STATE)
        with pytest.raises(UserError, match="no system message"):
            other.prompt(SYSTEM)


def test_prompts_beyond_the_context():
    chat = word_chat(max_new_tokens=5)
    chat.context = 40  # and so 35 of a prompt
    state = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand")), "")
    assert chat.prompt_tokens(state) == chat.message_tokens(state) and not chat.is_cut(state)
    for _ in range(6):
        state = state.then("Action: left", "Observation: nothing happens")
    length = sum(map(len, chat.message_tokens(state)))
    with pytest.raises(UserError, match=rf"{length} tokens.*5 are more than.*40.*--truncate oldest"):
        chat.prompt_tokens(state)
    chat.rendering.truncate = "oldest"
    for stays, asked in ((3, state), (1, State(state.messages[2:], ""))):  # whose first message tells all of it
        lists, whole = chat.prompt_tokens(asked), chat.message_tokens(asked)
        assert chat.is_cut(asked) and sum(map(len, lists)) <= 35
        assert lists == whole[:stays] + whole[stays - len(lists) :]  # instruction, task and the newest turns
        assert sum(map(len, lists + whole[stays : stays + 2])) > 35  # no more than had to go


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("m.content", "m.content + ('again' if loop.index == 5 else '')"),
        CHATML.replace("m.content", "m.content + ('!' if loop.last and m.role == 'user' else '')"),
        "{% if messages | length > 6 %}{{ raise_exception('long') }}{% endif %}" + CHATML,
        "{{ unknown.x.y }}",
        "{% set form = '%d' %}{{ strftime_now(form) }}" + CHATML,
    ],
)
def test_a_template_that_writes_later_turns_otherwise_is_refused(template):
    with pytest.raises(UserError, match=r"chat template (does not show|fails|prints another date)"):
        chat_of(template)


def prompting(words: str) -> str:
    return CHATML + "{% if add_generation_prompt %}{{ " + words + " }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (prompting("'<think></think>' if enable_thinking is false else '<think>'"), "<think></think>"),
        (prompting("'' if reasoning_effort == 'none' else raise_exception('none or high')"), ""),
        (prompting("'<|channel>final' if reasoning_effort == 'low' else ''"), "<|channel>final"),
        (CHATML.replace("m.content", "m.content + '/nothink' * (m.role == 'user' and not enable_thinking)"), ""),
        (prompting("'<think>\n'"), "<think>\n"),  # with no switch
    ],
)
def test_thinking_is_off_by_the_templates_own_switch_in_all_turns(template, words, capsys):
    warn_once.cache_clear()
    chat_of(template)
    chat = chat_of(template)
    written = chat.tokenizer.decode(chat.prompt(STATE))
    assert written.count("<|im_start|>assistant\n") == written.count("<|im_start|>assistant\n" + words) == 3
    assert written.endswith(words) and written.count("/nothink") == 3 * ("/nothink" in template)
    assert written.count("think>") == 3 * words.count("think>")
    assert capsys.readouterr().err.count("has no switch") == (words == "<think>\n")
    for thought, refused in (("<think>left?</think>", "</think>" in words), ("", False)):
        cloned = Demonstration("a", State((("user", "go"), ("assistant", f"{thought}Action: left"))))
        with pytest.raises(UserError, match="<think> would be cloned behind") if refused else nullcontext():
            refuse_second_thoughts([cloned], chat)


@pytest.mark.parametrize("kind", ["special", "ordinary", "split"])
def test_a_turn_ends_by_an_added_token_that_model_tokenizer_or_template_names(kind):
    """In a vocabulary of bytes "#" is token 2, the end that LlamaConfig names by default."""
    tokenizer = chat_tokenizer("none" if kind == "ordinary" else "chatml")
    tokenizer.chat_template = CHATML
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.split_special_tokens = kind == "split"
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    chat = Chat(tokenizer, Rendering(), ends=[2, None, start])
    assert chat.text(chat.action("click[size #4 <|im_end|>]", "")) == "click[size #4 <|im_end|>]"
    assert chat.prompt(State((("user", "see <|im_end|>"),))).count(chat.stop_id) == 1
    nothing_named = Chat(tokenizer, Rendering())
    assert nothing_named.prompt(State((("user", "see <|im_start|>"),))).count(start) == 2  # the template's own
    ids = tokenizer("Action: left", add_special_tokens=False).input_ids
    for end in (start, chat.stop_id, tokenizer.eos_token_id):
        assert chat.text([*ids, end, *ids]) == "Action: left"


@pytest.mark.parametrize(
    ("part", "value", "fault"),
    [
        ("normalizer", normalizers.Lowercase(), "gives an action's 'A' back as 'a'"),
        ("normalizer", normalizers.Replace("🙂", ""), "gives an action's '🙂' back as"),
        ("pre_tokenizer", pre_tokenizers.WhitespaceSplit(), "'<end>': the tokenizer produces it from plain text"),
        ("eos_token", None, "no eos_token"),
    ],
)
def test_a_tokenizer_that_changes_an_action_or_an_end_is_refused(part, value, fault):
    tokenizer = word_chat().tokenizer if part == "pre_tokenizer" else chat_tokenizer("none")
    setattr(tokenizer if part == "eos_token" else tokenizer.backend_tokenizer, part, value)
    with pytest.raises((UserError, ValueError), match=fault):
        Chat(tokenizer, Rendering())


SETTINGS = """temperature=-1 temperature=null temperature=true max_new_tokens="48" max_new_tokens=0 top_p=0 top_k=1.5
stop="Task:" stop=[1] candidates="all" truncate="newest" compact=1 date=2024 think=true"""


def test_settings_are_read_as_they_were_saved_or_refused(tmp_path):
    settings = Rendering(temperature=1, stop=["", "a"], truncate="oldest", system="", date="2024-07-26")
    settings.save(tmp_path)
    assert Rendering.load(tmp_path) == settings and settings.stop == ("a",)
    for name, value in (setting.split("=") for setting in SETTINGS.split()):
        (tmp_path / Rendering.FILE).write_text(f'{{"{name}": {value}}}')
        with pytest.raises(UserError, match=rf"policy\.json: .*{name}"):
            Rendering.load(tmp_path)


@pytest.mark.parametrize("kind", [FastPolicy, Policy])
def test_an_action_beyond_the_context_is_an_error(kind):
    """An action may be longer than --max-new-tokens; what is behind the context a model would read without a word."""
    chat = word_chat(max_new_tokens=5)
    chat.context = 20
    policy, qnet = kind(tiny_lm(chat), chat), scorer(QNet(tiny_backbone(chat), chat).eval(), plain=kind is Policy)
    state = State((("user", "walk find the purse"), ("assistant", "OK"), ("user", "you stand")), "")
    room = 20 - len(chat.prompt(state)) - 2  # "Action:" and the end
    fits, beyond = "Action: " + "left " * room, "Action: " + "left " * (room + 1)
    assert room > 5 and chat.fits(state, fits) and not chat.fits(state, beyond)
    readers = [
        lambda action: policy.likelihoods([LogProb(state, (action,))]),
        lambda action: policy.sample([Sample(state, 1, ("a",), 1.0, valid=("Action: left", action))]),
        lambda action: qnet.score([Score(state, (action,))]),
        lambda action: list(pack_pairs(chat, [[Pair(state, action, 1.0)]], 0, 100)),
    ]
    for read in readers:
        read(fits)
        with pytest.raises(UserError, match=f"action of {room + 3} are more than the model's context of 20: --trunc"):
            read(beyond)
