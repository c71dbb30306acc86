"""Episodes without a sampler: what an environment may answer, and examples/zoom.py.

Guards against: a faulty tool that ends a run, a reward that is not finite, control tokens in what a model sees, tokens
made again from text, and limits that are exceeded.
"""

import contextlib
import copy
import json
import math
import re
import resource
import time
from dataclasses import replace

import pytest
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing

pytest.importorskip("parts.turns", reason="needs parts/turns, which is not here")

import rewards
from common import environments, plugins
from common.environments import ENVIRONMENTS, tool_call
from common.errors import UserError
from data import encode_prompt, load_processor
from parts.turns import episodes, use_environment
from parts.turns.pictures import pixel_table
from parts.turns.trial import try_environment
from tests.helpers.models import WITH_IMAGES, save_tiny
from tests.helpers.rows import make_sample
from tests.helpers.samplers import begin_episode, take_turn
from tests.helpers.scripts import ROOT

pytestmark = pytest.mark.usefixtures("environments")


@pytest.fixture(scope="module")
def processor(tiny_model):
    return load_processor(tiny_model, "count")


def begin(processor, name: str, max_turns: int = 4, max_seen: int = 400, with_image: bool = True):
    processor = use_environment(processor, name, max_turns, max_seen)
    images = [Image.new("RGB", (84, 112), "navy")] if with_image else []
    sample = make_sample("<image>?" if with_image else "?", "3", images, "row 1", {"none": None, "function": "f"})
    return begin_episode([sample], processor)


def turn(episode, text: str, room: int = 100, end: str = "<|im_end|>") -> bool:
    """Let the model say `text`. Return whether the episode goes on."""
    tokenizer = episode.episodes.processor.tokenizer
    return take_turn(episode, tokenizer(text + end, add_special_tokens=False).input_ids, None, room, bool(end))


def seen(episode) -> str:
    """Return what the model has seen after its last turn that was answered."""
    return episode.trajectory.turns[-1].text


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dict", "error: ValueError: it returned a dict; expected texts and images, or None"),
        ("number", "error: ValueError: it returned a int; expected texts and images, or None"),
        ("list", "error: ValueError: it returned a list; expected texts and images, or None"),
        ("nan", "error: ValueError: its reward is nan; expected a finite number"),
        ("inf", "error: ValueError: its reward is inf; expected a finite number"),
        ("huge", "error: OverflowError: int too large to convert to float"),
        ("large", "error: ValueError: its reward is 1e+300; expected a finite number"),
        ("reward", "error: ValueError: its reward is None; expected a finite number"),
        ("quoted", "error: ValueError: its reward is '1.5'; expected a finite number"),
        ("pixels", "error: ValueError: its pictures of 400 megapixels are too large"),
        ("together", "error: ValueError: its pictures of 72 megapixels are too large"),
        ("strip", "error: the image is 20000x60: one side is more than 200 times the other"),
        ("thin", "error: the image is 1x300: one side is more than 200 times the other"),
        ("many", "error: 9 pictures are too many"),
        ("text", "error: ValueError: its answer of 10,000,000 characters is too long"),
        ("long", "error: the answer has 2020 tokens, and max_prompt_length leaves room for "),
        ("control", "error: the answer contains …, which would act as a control token"),
        ("no pixels", "error: ValueError: its picture has no pixels"),
        ("state", "error: TypeError: it has an open file"),
        ("hoard", "error: ValueError: its state of 10,000,0"),
        ("hang", "error: took longer than 0.3 s"),
        ("exit", "error: its process died"),
        ("kill", "error: its worker process died"),
        ("!", "error: ValueError: no fault is called '!' … … ?"),
    ],
)
def test_a_call_that_fails_is_answered_in_text_and_counted(fault, message, processor, monkeypatch):
    """The next one works. The state and the reward are those from before."""
    monkeypatch.setattr(rewards, "REWARD_TIMEOUT", 0.3 if fault == "hang" else 20)
    episode = begin(processor, "faulty")
    assert turn(episode, fault)
    assert seen(episode).startswith(message)
    assert (episode.trajectory.num_calls, episode.trajectory.num_failed, episode.reward) == (1, 1, 0.0)
    assert turn(episode, "go on")
    assert seen(episode) == "turn 1" and len(episode.trajectory.turns) == 4
    assert (episode.trajectory.num_calls, episode.trajectory.num_failed) == (2, 1)
    assert math.isfinite(episode.rollout().env_reward) and not episode.trajectory.images
    text = processor.tokenizer.decode(episode.trajectory.ids[~episode.trajectory.loss_mask])
    assert text.count("<|im_end|>") == 2 and "<|image_pad|>" not in text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6, "kilobytes"


def test_each_reason_is_printed_once_and_not_too_many(processor, monkeypatch, capsys):
    monkeypatch.setattr(episodes, "_reported", set())
    reasons = ("dict", "dict", "number", "list", "nan", "inf", "huge", "large", "reward", "thin", "many", "text")
    for fault in (*reasons, "no pixels"):
        assert turn(begin(processor, "faulty"), fault)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: a call of --env failed")]
    assert [line.count("it returned a dict") for line in notes] == [1] + 9 * [0]
    assert notes[-1].endswith("9 pictures are too many")


@pytest.mark.parametrize(("answer", "text"), [("nothing", ""), ("no text", ""), ("half", "a ? b")])
def test_an_odd_answer_is_one(answer, text, processor):
    episode = begin(processor, "faulty")
    assert turn(episode, answer) and episode.trajectory.num_failed == 0
    chat = processor.tokenizer.decode(episode.trajectory.ids)
    assert chat.endswith(f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


def test_the_rewards_of_all_turns_are_added(processor):
    episode = begin(processor, "pictures")
    assert turn(episode, "a") and not turn(episode, "abcde")
    assert (episode.rollout().env_reward, episode.rollout().truncated) == (0.5 + 1.0, False)


def test_a_state_may_hold_the_plugins_own_classes(processor):
    """This process has other plugins, too, so that the module of this one has another name in the workers."""
    episode = begin(processor, "faulty")
    for number in (1, 2):
        assert turn(episode, "own")
        assert seen(episode) == f"{number} and {number}"


def test_pictures_of_any_mode_are_fitted(processor):
    episode = begin(processor, "faulty")
    assert turn(episode, "picture")
    (picture,) = episode.trajectory.images
    assert (picture.mode, picture.size) == ("RGB", (56, 84))
    assert episode.trajectory.num_failed == 0 and len(episode.trajectory.image_indices) == 6


def test_a_model_without_a_vision_tower_is_told_that_it_gets_no_pictures(tmp_path):
    processor = load_processor(save_tiny("qwen2_5", tmp_path), "count")
    episode = begin(processor, "faulty", with_image=False)
    assert turn(episode, "picture") and seen(episode) == "error: the model is text-only, and the answer has a picture"
    assert turn(episode, "go on") and seen(episode) == "turn 1"


def test_no_trajectory_is_longer_than_its_limits(processor):
    """The environment is asked after the last turn, too, which may have a reward, but its answer is not seen."""
    episode = begin(processor, "faulty", max_turns=2)
    assert turn(episode, "go on") and not turn(episode, "go on")
    assert len(episode.trajectory.turns) == 3 and episode.rollout().truncated
    assert episode.trajectory.num_calls == 2 and episode.trajectory.turn_lengths == [6, 6]
    for name, kwargs in (("room", {"room": 0}), ("stop", {"end": ""})):
        episode = begin(processor, "faulty")
        assert not turn(episode, "go on", **kwargs), name
        assert episode.rollout().truncated and episode.rollout().text == "go on"
    length = len(begin(processor, "faulty").prompt.ids)
    for left, failed in ((10, 1), (39, 0), (60, 0)):  # "turn 1" takes 39 tokens with what is around it
        episode = begin(processor, "faulty", max_seen=length + left)
        assert turn(episode, "go on") == (left >= 39), left
        assert (episode.trajectory.num_failed, episode.rollout().truncated) == (failed, left < 39)
        assert int((~episode.trajectory.loss_mask).sum()) <= left


def test_an_episode_ends_with_a_sampled_image_token(processor):
    """A sampler that takes images would take it for one."""
    episode = begin(processor, "faulty")
    assert not turn(episode, "<|image_pad|>picture")
    assert not len(episode.trajectory.image_indices) and episode.rollout().truncated


def test_equal_pixels_in_another_shape_are_another_picture(processor):
    """The features of a frozen tower are cached by this hash."""
    episodes = []
    for size in ((56, 84), (84, 56)):
        episodes.append(begin(processor, "faulty"))
        episodes[-1]._see([Image.new("RGB", size)], 0)
    assert len({each.added.image_digest for each in episodes}) == 2


def test_the_environment_of_the_document_runs(processor, tmp_path):
    """docs/turns.md: two calls, of which the second goes on from the first, and an answer."""
    code, trial = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "turns.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 20
    (tmp_path / "rotate.py").write_text(code)
    plugins.import_file(str(tmp_path / "rotate.py"))
    exec(trial.replace("rotate.py:", f"{tmp_path}/rotate.py:"), {})
    episode = begin(processor, "rotate", max_seen=900)
    for _ in range(2):
        assert turn(episode, call({"degrees": 90}, "rotate")) and seen(episode) == "Now it is:<image>"
    assert not turn(episode, "A photo of 3 circles")
    assert [image.size for image in episode.trajectory.images] == [(112, 84), (84, 112)]
    assert episode.reward == pytest.approx(-0.04) and not episode.trajectory.num_failed
    rotate = ENVIRONMENTS["rotate"].reply
    for degrees in ("NaN", "1e999", "-Infinity", "true", '"90"', "null", "9" * 400):
        with pytest.raises(ValueError, match="rotate needs degrees"):
            rotate(call({"degrees": 0}, "rotate").replace("0", degrees), {}, [PICTURE])
    assert rotate('{"name": "John", "parameters": {"degrees": 90}}', {}, [PICTURE]) is None, "an answer in JSON"


def test_a_plugin_changes_how_large_a_state_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "MAX_STATE", environments.MAX_STATE)
    (tmp_path / "large.py").write_text(
        "from common import environments\n\nenvironments.MAX_STATE = 2**22\n\n\n"
        "def hoard(text, state):\n    state['all'] = bytes(int(text))\n    return 'kept'\n"
    )
    kept, failed = try_environment(f"{tmp_path}/large.py:hoard", ["2000000", "5000000"])
    assert kept.content == ["kept"]
    assert failed.content[0].startswith("error: ValueError: its state of 5,000,0") and "too large" in failed.content[0]


def test_an_environment_is_tried_without_a_model():
    """The state is kept from turn to turn, but not what a turn that raises has changed; examples/zoom.py works too."""
    own = f"{ROOT}/tests/helpers/counting.py"
    first, failed, second = try_environment(f"{own}:count", ["a", "raise", "b"], column="c")
    assert (first.content, second.content) == (["1 c"], ["2 c"]) and failed.content == ["error: KeyError: 'raise'"]
    whole = call({"x1": 0, "y1": 0, "x2": 1000, "y2": 1000})
    (part,) = try_environment(f"{ROOT}/examples/zoom.py:zoom", [whole], [Image.new("RGB", (64, 32))])
    assert part.content[0].size == (448, 224)
    with pytest.raises(UserError, match="the episode is over after turn 1"):
        try_environment(f"{ROOT}/examples/zoom.py:zoom", ["3", "4"])
    with pytest.raises(AttributeError, match=r"zoom.py has no zom, but zoom$"):
        try_environment(f"{ROOT}/examples/zoom.py:zom", ["3"])


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_tokens_are_never_made_again_from_text(processor):
    """Two tokens that the tokenizer would have merged, and bytes that are no character, stay as they were sampled."""
    base = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    base["model"]["vocab"]["ab"] = 300
    base["model"]["merges"] = [["a", "b"]]
    tokenizer = type(processor.tokenizer)(
        tokenizer_object=type(processor.tokenizer.backend_tokenizer).from_str(json.dumps(base)),
        eos_token="<|im_end|>",
        chat_template=processor.tokenizer.chat_template,
    )
    episode = begin(replace(processor, tokenizer=tokenizer), "faulty", with_image=False)
    letters = [tokenizer.convert_tokens_to_ids(token) for token in "ab"]
    half, end = tokenizer("é").input_ids[:1], [tokenizer.eos_token_id]
    ids = torch.tensor(letters + half + end)
    assert tokenizer(tokenizer.decode(ids)).input_ids != ids.tolist()
    assert all(take_turn(episode, ids.tolist(), torch.arange(4.0)) for _ in range(2))
    rollout = episode.rollout()
    assert rollout.ids.tolist() == ids.tolist() * 2 and rollout.sampling_logp.tolist() == [0, 1, 2, 3] * 2
    assert rollout.trajectory.ids[:4].tolist() == ids.tolist()
    assert rollout.trajectory.engine_ids == rollout.trajectory.ids.tolist()
    chat = tokenizer.decode(rollout.trajectory.ids[4:-4])
    assert chat.startswith("\n<|im_start|>user\nerror: ") and chat.count("<|im_end|>\n<|im_start|>assistant\n") == 1


def test_an_answer_begins_no_sequence(processor):
    """A tokenizer may put a token before each text."""
    tokenizer = copy.deepcopy(processor.tokenizer)
    begins = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.pad_token_id)])
    tokenizer.backend_tokenizer.post_processor = begins
    assert tokenizer.decode(tokenizer("a").input_ids) == "<|endoftext|>a"
    episode = begin(replace(processor, tokenizer=tokenizer), "faulty")
    assert turn(episode, "go on")
    chat = tokenizer.decode(episode.trajectory.ids)
    assert chat == "go on<|im_end|>\n<|im_start|>user\nturn 1<|im_end|>\n<|im_start|>assistant\n"


def test_what_a_model_sees_follows_its_stop_token(processor):
    """If that is not the one of the chat template, the template's follows it."""
    texts = []
    for end in ("<|im_end|>", "<|endoftext|>"):
        episode = begin(processor, "faulty")
        assert turn(episode, "go on", end=end)
        texts.append(processor.tokenizer.decode(episode.trajectory.ids))
    assert texts[0] == "go on<|im_end|>\n<|im_start|>user\nturn 1<|im_end|>\n<|im_start|>assistant\n"
    assert texts[1] == texts[0].replace("go on", "go on<|endoftext|>")


# --- zoom -------------------------------------------------------------------------------------------------------------

PICTURE = Image.linear_gradient("L").resize((400, 200)).convert("RGB")


def call(arguments: object, name: str = "zoom") -> str:
    return f"I look.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def zoomed(text: str, extent: tuple[int, int]) -> Image.Image | None:
    return ENVIRONMENTS["zoom"].reply(text, {}, [PICTURE], [extent], answer="3")


@pytest.mark.parametrize("extent", [(1000, 1000), (56, 28)], ids=["qwen3_vl", "qwen2_5_vl"])
def test_zoom_cuts_the_part_in_the_coordinates_of_the_family(extent):
    """By hand: the right half, from a quarter of the height down."""
    width, height = extent
    part = zoomed(call({"x1": width / 2, "y1": height / 4, "x2": width, "y2": height}), extent)
    want = PICTURE.crop((200, 50, 400, 200)).resize((448, 336))
    assert part.size == (448, 336) and list(part.getdata()) == list(want.getdata())
    whole = zoomed(call({"x1": 0, "y1": 0, "x2": width, "y2": height}), extent)
    assert whole.size == (448, 224)
    assert zoomed("It is 3.", extent) is None


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_an_environment_gets_the_extents_of_the_family(family, tmp_path, monkeypatch):
    """Qwen2.5-VL counts the pixels of the fitted image, the others to 1000. The picture itself is not fitted."""
    processor = use_environment(load_processor(save_tiny(family, tmp_path), "count", max_pixels=6300), "zoom", 4, 400)
    sample = make_sample("<image>?", "3", [PICTURE], "row 1")
    episode = begin_episode([sample], processor)
    calls = []
    monkeypatch.setattr(episode.episodes, "ask", lambda state, fields: calls.append(fields) or (None, 0.0, state))
    assert not turn(episode, "3")
    assert calls[0]["extents"] == [(112, 56) if family == "qwen2_5_vl" else (1000, 1000)]
    assert calls[0]["images"][0].size == (400, 200)
    assert (calls[0]["question"], calls[0]["answer"], calls[0]["text"]) == ("?", "3", "3")


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_pictures_become_the_pixel_values_of_the_image_processor(family, tmp_path):
    """A table and a layout that are read from the image processor give the same bits; else there is no table."""
    processor = load_processor(save_tiny(family, tmp_path), "count")
    table = pixel_table(processor)
    assert (table is not None) == (family.startswith("qwen") or family == "glm4v")
    if table:
        for width, height in ((56, 112), (168, 56)):
            picture = Image.effect_noise((width, height), 90).convert("RGB")
            picture.paste((250, 3, 77), (0, 0, 20, 40))
            expected = processor.vision_inputs([picture])
            assert torch.equal(table.pixel_values(picture, torch.device("cpu")), expected["pixel_values"])
            assert [table.grid(picture)] == expected["image_grid_thw"].tolist()


def test_an_episode_that_was_interrupted_in_its_first_turn_goes_on(processor):
    """It has seen nothing yet, so that its prompt stays what it was."""
    begun = begin(processor, "zoom")
    request = replace(begun.request, tokens=begun.request.tokens)
    old = replace(begun.rollout(), ids=torch.tensor([7, 8]), sampling_logp=torch.zeros(2))
    again = begun.episodes.begin(0, request, old)
    assert again.prompt.extends is None and again.tokens.tolist() == [7, 8]


BOX = {"x1": 0, "y1": 0, "x2": 9, "y2": 9}
NEEDS = "zoom needs numbers with 0 <= x1 < x2 <= 56 and 0 <= y1 < y2 <= 28"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *[(call(BOX | {"x1": value}), NEEDS) for value in (-1, 9, 10, math.nan, -math.inf, "0", True, None, [0], {})],
        *[(call(BOX | {"y2": value}), NEEDS) for value in (29, 1e400, 10**400, 1e30, -0.5)],
        (call({"x1": 0, "y1": 0, "x2": 9}), NEEDS),
        (call({}), NEEDS),
        (call([1, 2, 3, 4]), "a call is JSON: "),
        ('<tool_call>{"name": "zoom"}</tool_call>', "a call is JSON: "),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "a call is JSON: "),
        ("<tool_call>zoom(0, 0, 9, 9)</tool_call>", "a call is JSON: "),
        ("<tool_call></tool_call>", "a call is JSON: "),
        ("<tool_call>" + "[" * 100_000, "a call is JSON: "),
        ('<tool_call>{"name": "zoom", "arguments": {"x1": ' + "9" * 5000, "a call is JSON: "),
        (call(BOX) * 2, "one call at a time"),
        (call(BOX, "crop"), "there is no tool 'crop', only zoom"),
    ],
)
def test_a_call_that_zoom_cannot_answer_is_explained(text, message):
    with pytest.raises(ValueError) as error:
        zoomed(text, (56, 28))
    assert str(error.value).startswith(message)


def test_a_row_without_a_picture_is_explained():
    with pytest.raises(ValueError, match=r"^there is no picture$"):
        ENVIRONMENTS["zoom"].reply(call(BOX), {}, [], [])


def test_zoom_answers_a_model(processor):
    """The thinnest part is one that the model cannot see, which it is told."""
    episode = begin(processor, "zoom", max_seen=900)
    assert "zoom" in processor.tokenizer.decode(episode.prompt.ids), "the system prompt describes the tool"
    assert turn(episode, call({"x1": 0, "y1": 0, "x2": 42, "y2": 56}))
    assert [image.size for image in episode.trajectory.images] == [(336, 448)]
    assert not turn(episode, "A photo of 3 circles")
    assert not episode.rollout().truncated and episode.rollout().text == "A photo of 3 circles"
    assert (episode.trajectory.num_calls, episode.trajectory.num_failed) == (1, 0)


def test_a_thin_part_is_explained(processor):
    wide = make_sample("<image>?", "3", [Image.new("RGB", (1000, 10))], "row 1")
    episode = begin_episode([wide], use_environment(processor, "zoom", 4, 900))
    width, _ = episode.prompt.images[0].size
    assert turn(episode, call({"x1": 0, "y1": 0, "x2": width, "y2": 0.1}))
    assert "one side is more than 200 times the other" in seen(episode)


CALL = {"name": "f", "arguments": {"x": 1}}
LLAMA = '{"name": "f", "parameters": {"x": 1}}'


@pytest.mark.parametrize(
    "text",
    [
        *(
            f"<tool_call>{json.dumps(CALL)}",
            f"<think>hm</think>I look.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>\n",
        ),
        *(f" {LLAMA}\n", f"<think>hm</think>\n{LLAMA}", '{"parameters": {"x": 1}, "name": "f"}'),
        *(f"<|python_tag|>{LLAMA}", f"I look. <|python_tag|> {LLAMA}<|eom_id|>", f"hm</think><|python_tag|>{LLAMA}"),
        *(f'{tag}{{"type": "function", {LLAMA[1:]}' for tag in ("", "<|python_tag|>")),
        *(f"<think>or <tool_call> or {tag}{LLAMA}</think>{LLAMA}" for tag in ("<tool_call>", "<|python_tag|>")),
    ],
)
def test_a_call_as_models_write_it(text):
    assert tool_call(text) == tool_call(text, ["g", "f"]) == ("f", {"x": 1})


@pytest.mark.parametrize("said", ["</tool_call>", "<tool_call>{}</tool_call>", "</think>", "<think>", "<|python_tag|>"])
@pytest.mark.parametrize("before", ["", "<tool_call>", "<think>hm</think>", "<think>hm</think><|python_tag|>"])
def test_arguments_are_data(before, said):
    arguments = {"x": "__import__('os').getpid()", "y": f"{said} {said} please"}
    assert tool_call(before + json.dumps({"name": "f", "parameters": arguments})) == ("f", arguments)


@pytest.mark.parametrize(
    "text",
    [
        *('{"answer": 3, "parameters": {}}', '{"name": "John", "age": 3, "parameters": {}}', '{"name": "John"}'),
        *(f"I say {LLAMA}", f"{LLAMA} is it", f"<answer>{LLAMA}</answer>", f"{LLAMA}; {LLAMA}", "3", "null", ""),
        "<think>I could use <tool_call> here, or <tool_call>{}</tool_call>.</think><answer>3</answer>",
        *(f"{opening}{call({})}</think>3" for opening in ("<think>", "", "<think>not </think>, but ")),
        *(f"<think>{before}{call({})}" for before in ("", "one <think> two ", "not <answer>3</answer>")),
        *(f"<think>{LLAMA}", f"<think><|python_tag|>{LLAMA}", f"<think>a</think><think>b {call({})}"),
    ],
)
def test_what_is_an_answer_or_thought_is_no_call(text):
    assert tool_call(text) is None


def test_json_without_a_tag_is_a_call_only_of_a_tool_there_is():
    assert tool_call(LLAMA, ["f"]) and tool_call(LLAMA, ["g"]) is None
    for tag in ("<tool_call>", "<|python_tag|>"):
        with pytest.raises(ValueError, match=r"^there is no tool 'f', only g, h$"):
            tool_call(tag + LLAMA, ["g", "h"])


@pytest.mark.parametrize(
    "text", ['{"name": "f", "parameters": 3}', f"<tool_call>{LLAMA}}}", "<|python_tag|>f.call(x=1)"]
)
def test_what_is_no_json_of_a_call_is_explained(text):
    with pytest.raises(ValueError, match=r"^a call is JSON: "):
        tool_call(text)


@pytest.mark.parametrize(
    "piece", ["<tool_call>", "</think>{", '<tool_call>{"', '<|python_tag|>["', "<think>", "[", "\n"]
)
def test_no_turn_is_long_to_read(piece):
    start = time.perf_counter()
    for before in ("", "<tool_call>", '<tool_call>{"'):
        with contextlib.suppress(ValueError):
            tool_call(before + piece * (30_000 // len(piece)))
    assert time.perf_counter() - start < 3


# --- chat templates ---------------------------------------------------------------------------------------------------

QWEN3 = (  # what matters of Qwen3-VL's: tools, their answers, and a block that it opens
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ 'user\n<tool_response>' if m.role == 'tool' else m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '\n</tool_response>' if m.role == 'tool' else '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
LLAMA3 = (  # Llama 3.1 describes even an empty list of tools, and writes a tool's answer as JSON: many texts change
    "{% if tools is defined and tools is not none %}Functions: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_template(processor, chat_template: str):
    tokenizer = copy.deepcopy(processor.tokenizer)
    tokenizer.chat_template = chat_template
    return replace(processor, tokenizer=tokenizer, system=None)


def test_a_template_that_knows_tools_writes_them_and_their_answers(processor):
    """What it opens in each turn begins the turn's text."""
    episode = begin(with_template(processor, QWEN3), "zoom", max_seen=2000, with_image=False)
    prompt = processor.tokenizer.decode(episode.prompt.ids)
    assert prompt.startswith('<|im_start|>system\n# Tools\n{"') and prompt.endswith("assistant\n<think>\n")
    assert turn(episode, "hm</think>" + call({}, "crop"))
    assert seen(episode) == "error: ValueError: there is no tool 'crop', only zoom"
    answered = processor.tokenizer.decode(episode.trajectory.ids[~episode.trajectory.loss_mask])
    want = f"\n<|im_start|>user\n<tool_response>\n{seen(episode)}\n</tool_response><|im_end|>\n"
    assert answered == f"{want}<|im_start|>assistant\n<think>\n"
    assert not turn(episode, "3</think>4")
    assert episode.rollout().text == "<think>\n3</think>4" and episode.trajectory.opening == "<think>\n"
    episode = begin(with_template(processor, QWEN3), "faulty")
    assert turn(episode, "picture") and episode.trajectory.num_failed == 0
    answered = processor.tokenizer.decode(episode.trajectory.engine_ids)
    assert "user\n<tool_response>\nsee <|vision_start|><|image_pad|><|vision_end|>\n</tool_response>" in answered


def test_a_template_that_leaves_out_the_picture_of_a_tool_has_it_in_the_users_turn(processor):
    blind = QWEN3.replace("part.type == 'image' %}", "part.type == 'image' %}{% if m.role != 'tool' %}")
    blind = blind.replace("<|vision_end|>{% else %}", "<|vision_end|>{% endif %}{% else %}")
    episode = begin(with_template(processor, blind), "faulty")
    assert turn(episode, "picture") and episode.trajectory.num_failed == 0
    answered = processor.tokenizer.decode(episode.trajectory.engine_ids)
    assert "<|im_start|>user\nsee <|vision_start|><|image_pad|><|vision_end|><|im_end|>" in answered


def test_a_prompt_without_tools_stays_as_it_is(processor):
    own = with_template(processor, LLAMA3)
    prompts = [begin(own, name, with_image=False).prompt.ids for name in ("over", "zoom")]
    plain = encode_prompt(make_sample("?", "3", [], "row 1"), own).ids
    assert torch.equal(prompts[0], plain) and len(prompts[1]) > len(plain)


def test_a_template_that_changes_the_answer_of_a_tool_writes_it_as_the_users(processor):
    episode = begin(with_template(processor, LLAMA3), "faulty", with_image=False)
    assert turn(episode, "!")
    answered = processor.tokenizer.decode(episode.trajectory.ids[~episode.trajectory.loss_mask])
    assert answered == f"\n<|im_start|>user\n{seen(episode)}<|im_end|>\n<|im_start|>assistant\n"
    assert "no fault is called '!'" in answered and episode.trajectory.num_failed == 1
