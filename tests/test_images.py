"""Images in prompts: which a row has, the learner on several families, and runs with an engine.

pytest tests/test_images.py             without an engine
pytest tests/test_images.py -m slow     runs
"""

import asyncio
import base64
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from colour import squares
from conftest import ROOT, cpu_only, metrics_of, settings_of
from fakes import local_rewards
from learners import CPU, assert_same, config, numbers, on_ranks, use_sgd, weights_of
from PIL import Image
from test_multimodal import build, of_language_model
from transformers import AutoTokenizer, LlavaNextConfig, LlavaNextForConditionalGeneration
from transformers.image_utils import load_image
from vllm.multimodal.image import convert_image_mode

from trainer.errors import RunError, TaskError
from trainer.images import PLACE, Images, take_images
from trainer.learning import layout
from trainer.learning.grpo import GRPOLearner
from trainer.learning.multimodal import states_with_images
from trainer.learning.rollout import Rollout
from trainer.rollouts import conversation
from trainer.rollouts.conversation import Conversation
from trainer.rollouts.options import engine_options
from trainer.tasks.dataset import Row
from trainer.tasks.rewards import Batch, Group, Rewards
from trainer.tasks.task import TaskArguments, load_task
from trainer.tasks.tiny_model import build_tiny_model

ORIENTATION = 0x0112  # an image's EXIF tag
RED, BLUE = (Image.new("RGB", (28, 28), colour) for colour in ("red", "blue"))


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def colours(images):
    return [image.getpixel((0, 0)) for image in images.decoded()]


# --- Rows -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path):
    RED.save(tmp_path / "red.png")
    BLUE.save(tmp_path / "blue.png")
    return [str(tmp_path / "red.png"), str(tmp_path / "blue.png")]


TEXT = {"type": "text", "text": "?"}


def user(*parts):
    return {"role": "user", "content": [*parts]}


def test_images_come_from_columns_and_from_parts_of_messages(paths):
    red, system, plain = paths[0], {"role": "system", "content": "!"}, {"role": "user", "content": "?"}
    url = "data:image/png;base64," + base64.b64encode(png(BLUE)).decode()
    parts = {"type": "image", "url": red}, {"type": "image_url", "image_url": {"url": url}}
    for record in (
        {"prompt": [system, plain], "images": paths},
        {"prompt": [system, plain], "images": [RED, png(BLUE)]},
        {"prompt": [system, plain], "images": [{"bytes": None, "path": red}, {"bytes": png(BLUE), "path": "-"}]},
        {"prompt": [system, user(PLACE, PLACE, TEXT)], "images": paths},
        {"prompt": [system, user({"type": "image", "image": red}, PLACE, TEXT)], "image": BLUE},
        {"prompt": [system, user(*parts, TEXT)]},
    ):
        messages, images = take_images(record, "row 1")
        assert messages == [system, user(PLACE, PLACE, TEXT)]
        assert colours(images) == [(255, 0, 0), (0, 0, 255)]
    assert take_images({"prompt": [plain], "images": []}, "row 1") == ([plain], None)


def test_what_is_wrong_with_an_image_names_its_row(paths, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    question = user(PLACE, TEXT)
    for images, message in (
        ([*paths], "^row 1: 2 images, and messages with places for 1$"),
        ([], "^row 1: 0 images, and messages with places for 1$"),
        ([str(tmp_path / "none.png")], "^row 1: the image .*none.png cannot be read: FileNotFoundError: "),
        ([str(tmp_path / "text.png")], "^row 1: the image .*text.png cannot be read: Unidentified"),
        ([7], "^row 1: 7 is no image: "),
    ):
        with pytest.raises(TaskError, match=message):
            take_images({"prompt": [question], "images": images}, "row 1")
    (answer,), _ = take_images({"prompt": [{"role": "assistant", "tool_calls": []}], "images": [*paths]}, "row 1")
    assert answer["content"].count(PLACE) == len(paths)
    _, cut = take_images({"prompt": [question], "images": [png(Image.effect_noise((99, 99), 9))[:-999]]}, "row 1")
    with pytest.raises(TaskError, match=r"^row 1: an image cannot be read: "):
        cut.decoded()
    _, far = take_images({"prompt": [question], "images": ["http://127.0.0.1:9/a.png"]}, "row 1")
    with pytest.raises(TaskError, match=r"^row 1: the image http://127.0.0.1:9/a.png cannot be read: "):
        far.read()


def pixels(image):
    return image.size, image.mode, image.tobytes()


def test_image_is_turned_as_its_tag_says_wherever_a_row_has_it(tmp_path):
    """As `datasets` and transformers do. vLLM turns what has the tag, so what the engine gets must have none."""
    path, exif = tmp_path / "tagged.jpg", Image.Exif()
    exif[ORIENTATION] = 6
    Image.effect_noise((56, 28), 90).save(path, exif=exif)
    opened, column = Image.open(path), datasets.Image()
    from_datasets = column.decode_example({"path": str(path), "bytes": None}).convert("RGB")
    expected = [pixels(image) for image in (load_image(str(path)), from_datasets)]
    assert expected[0] == expected[1]
    assert expected[0][0] == (28, 56)
    for form in (str(path), path, path.read_bytes(), opened, {"bytes": None, "path": str(path)}):
        _, images = take_images({"prompt": [user(TEXT)], "images": [form]}, "row 1")
        (image,) = images.decoded()
        assert pixels(image) == expected[0]
        assert ORIENTATION not in image.getexif()
    part = {"type": "image", "image": str(path)}
    assert pixels(take_images({"prompt": [user(part, TEXT)]}, "row 1")[1].decoded()[0]) == expected[0]


def drawn(mode):
    """An image in this mode: a row of pixels from dark to light, or from transparent to opaque."""
    greys = Image.linear_gradient("L").resize((16, 4))
    if mode == "P":  # whose first colour is transparent
        image = greys.convert("P")
        image.info["transparency"] = image.getpixel((0, 0))
        return image
    if "A" in mode:
        return Image.merge(mode, [Image.new("L", greys.size)] * (len(mode) - 1) + [greys])
    return greys.convert(mode)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr"])
def test_image_of_any_mode_is_rgb_as_vllm_makes_it(tmp_path, mode):
    image = drawn(mode)
    assert image.mode == mode
    expected = pixels(convert_image_mode(image, "RGB"))
    (taken,) = take_images({"prompt": [user()], "image": image}, "row 1")[1].decoded()
    assert pixels(taken) == expected
    image.save(tmp_path / "image.tiff" if mode in ("CMYK", "YCbCr") else tmp_path / "image.png")
    (path,) = tmp_path.iterdir()
    (read,) = Images((str(path),), "row 1").decoded()
    assert pixels(read) == pixels(convert_image_mode(Image.open(path), "RGB"))


@pytest.mark.parametrize("ending", ["png", "tiff", "pgm"])
def test_16_bits_of_grey_become_8(tmp_path, ending):
    image = Image.new("I;16", (3, 1))
    for x, value in enumerate((0, 0x80FF, 0xFFFF)):
        image.putpixel((x, 0), value)
    image.save(tmp_path / f"grey.{ending}")
    for form in (image, str(tmp_path / f"grey.{ending}")):
        (read,) = take_images({"prompt": [user()], "image": form}, "row 1")[1].decoded()
        assert [read.getpixel((x, 0)) for x in range(3)] == [(0,) * 3, (0x80,) * 3, (0xFF,) * 3]


def test_image_that_does_not_say_what_is_white_names_its_row(tmp_path):
    long = Image.new("I", (2, 2), 1 << 20)
    for image in (Image.new("F", (2, 2), 0.5), long):
        with pytest.raises(TaskError, match=f"^row 1: an image .* ValueError: .* white in mode {image.mode}"):
            take_images({"prompt": [user()], "image": image}, "row 1")
        image.save(tmp_path / "image.tiff")
        _, images = take_images({"prompt": [user()], "image": str(tmp_path / "image.tiff")}, "row 1")
        with pytest.raises(TaskError, match=f"^row 1: .* white in mode {image.mode}"):
            images.decoded()


class File(bytes):
    """A file whose bytes nobody writes out."""

    def __repr__(self):
        raise AssertionError("twice as long, and slow")


def test_key_is_of_the_images_bytes_and_their_order():
    one, two, three = ((File(b"ab"), File(b"c")), (File(b"a"), File(b"bc")), (File(b"c"), File(b"ab")))
    keys = [Images(files, "row 1").key for files in (one, two, three)]
    assert len(set(keys)) == 3
    assert Images((b"ab", b"c"), "row 2").key == keys[0]
    Images(("\ud83d.png",), "row 1").key  # noqa: B018 - a path that is no Unicode


def task_of(folder, rows, **flags):
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task(TaskArguments(dataset=str(file), reward=["trainer.tasks.rewards:exact"], **flags), 0, 1)


def test_equal_questions_about_other_images_are_other_prompts(paths, tmp_path):
    question = [{"role": "user", "content": "?"}]
    rows = [{"prompt": question, "images": [path], "answer": ""} for path in paths]
    task = task_of(tmp_path, rows, eval_share=0.5)
    assert sorted(colours(row.images) for row in (*task.rows, *task.eval_rows)) == [[(0, 0, 255)], [(255, 0, 0)]]


def test_model_that_takes_text_alone_gets_no_images(paths, tmp_path):
    tiny_model = build_tiny_model(tmp_path / "model")
    task = task_of(tmp_path, [{"prompt": [{"role": "user", "content": "?"}], "images": paths, "answer": ""}])
    with pytest.raises(TaskError, match=r"row 0 of train: the prompt has images, and .* takes text alone"):
        task.tokenized(str(tiny_model))
    with pytest.raises(TaskError, match=r"row 0 of train: a prompt with images is chat messages, and not a text"):
        task_of(tmp_path, [{"prompt": "?", "images": paths, "answer": ""}])
    with pytest.raises(RunError, match=r"^--train-vision is for multimodal models, without adapters$"):
        GRPOLearner(str(tiny_model), config(train_vision=True), CPU)


def test_template_may_be_in_the_processors_file_alone(tmp_path):
    model = build("Gemma3", tmp_path / "model")
    task = task_of(tmp_path, [{"prompt": [{"role": "user", "content": "?"}], "answer": ""}])
    expected = task.tokenized(model).rows[0].prompt_ids
    template = tmp_path / "model" / "chat_template.jinja"
    (tmp_path / "model" / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    assert task.tokenized(model).rows[0].prompt_ids == expected


def test_images_of_datasets_stay_as_files_have_them(tmp_path, paths):
    rows = {"prompt": [[{"role": "user", "content": "?"}]], "images": [[RED, BLUE]], "answer": [""]}
    features = datasets.Features(
        {
            "prompt": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
            "images": datasets.List(datasets.Image()),
            "answer": datasets.Value("string"),
        }
    )
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "data.parquet")
    args = TaskArguments(dataset=str(tmp_path / "data.parquet"), reward=["trainer.tasks.rewards:exact"])
    (row,) = load_task(args, 0, 1).rows
    assert [type(file) for file in row.images.files] == [bytes, bytes]
    assert colours(row.images) == [(255, 0, 0), (0, 0, 255)]


def test_rewards_that_take_no_images_decode_none_and_others_have_their_own(monkeypatch):
    opened = []
    monkeypatch.setattr(Images, "decoded", lambda self: opened.append(self) or [RED, BLUE])

    def blind(completions, **_):
        return [0.0] * len(completions)

    def painter(completions, images, **_):
        for own in images:
            assert [image.getpixel((0, 0)) for image in own] == [(255, 0, 0), (0, 0, 255)]
            own.pop().putpixel((0, 0), 0)
            own[0].putpixel((0, 0), 0)
        return [float(len(images))] * len(images[:9])

    def sees_none(completions, images, **_):
        return [float([*images] == [None] * 3)] * 3

    def scored(*functions, images):
        names = [function.__name__ for function in functions]
        monkeypatch.setitem(sys.modules, "graded", SimpleNamespace(**dict(zip(names, functions, strict=True))))
        row = Row([user(PLACE, PLACE)], {"images": images}, "row 1", [], images or None)
        rewards = Rewards([f"graded:{name}" for name in names], None, [row])
        group = Group(row, [Rollout([1], [2], [], None, "") for _ in range(3)])
        return [own.reward for own in local_rewards(rewards).compute(Batch([group]), 0).rollouts]

    images = Images(("red.png", "blue.png"), "row 1")
    assert scored(blind, images=images) == [0.0] * 3
    assert not opened
    assert scored(blind, painter, images=images) == [3.0] * 3
    assert len(opened) == 1
    assert scored(sees_none, images=[]) == [1.0] * 3  # as rows of a dataset that has images in others
    assert RED.getpixel((0, 0)) == (255, 0, 0)


def test_conversation_keeps_its_images_and_the_engines_prompt(paths, monkeypatch):
    monkeypatch.setattr(conversation, "parse", lambda *_: {"role": "assistant", "content": ""})

    async def open_environment(row, evaluation, images):
        return None, None

    template = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: ""))
    tools = SimpleNamespace(schemas_of=lambda row: [], open=open_environment, template=template)
    tools.args = SimpleNamespace(max_tool_iterations=None)
    row = Row([user(PLACE, TEXT)], {}, "row 1", [7, 8], Images((paths[0],), "row 1"))
    talk = Conversation(tools, row, row.images.read(), 0, 9)
    asyncio.run(talk.start())
    assert talk.turn.prompt_ids == [7, 8]  # with one token for the image: the engine expands it again in each turn
    asyncio.run(talk.take(Rollout([7, 7, 7, 8], [5], [-1.0])))
    assert talk.turn.prompt_ids == [7, 8, 5]
    rollout = talk.rollout()
    assert rollout.prompt_ids == [7, 7, 7, 8]
    assert colours(rollout.images) == [(255, 0, 0)]
    talk.max_model_len = 11
    assert talk.room == 11 - 5  # the engine's limit counts the image's tokens


# --- The learner ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["Qwen2_5_VL", "Qwen3VL", "Gemma3"])
def model(request, tmp_path_factory):
    return build(request.param, tmp_path_factory.mktemp(request.param))


def asked(processor, images):
    """What a prompt with these images is for the model, expanded by its processor."""
    messages = [{"role": "user", "content": [PLACE] * len(images) + [TEXT]}]
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    return processor(text=[text], images=images, return_tensors="pt")


def groups(learner, count=3):
    """Two groups: of one image and of two. One completion has the token that stands for a feature."""
    processor, token = learner.model.processor, learner.model.module.config.image_token_id
    rng, batch = torch.Generator().manual_seed(0), []
    noise = [Image.effect_noise((28 * k, 28), 50).convert("RGB") for k in (1, 2)]
    for number, images in enumerate([[RED], [BLUE, noise[number_of(processor)]]]):
        files = Images(tuple(map(png, images)), "row 1")
        prompt = asked(processor, images)["input_ids"][0].tolist()
        for i in range(count):
            ids = torch.randint(2, 200, (3 + i,), generator=rng).tolist()
            ids[1] = token if i == number else ids[1]
            batch.append(Rollout(prompt, ids, [0.0] * len(ids), float(i), images=files))
    logprobs = learner.model.score_all(batch)[0]
    return [replace(r, logprobs=row[: len(r.completion_ids)].tolist()) for r, row in zip(batch, logprobs, strict=True)]


def number_of(processor):
    return int("Qwen" in type(processor).__name__)  # Gemma's images are of one size


def test_scores_are_those_of_transformers_and_the_tower_runs_once_a_group(model, monkeypatch):
    monkeypatch.setattr(layout, "SHARED_TOKENS", 1)  # as of long prompts, of which those with images share no row
    learner = GRPOLearner(model, config(), CPU)
    module, batch = learner.model.module, groups(learner)
    encoded, encode = [], module.base_model.get_image_features
    module.base_model.get_image_features = lambda *args, **options: encoded.append(1) or encode(*args, **options)
    logprobs = learner.model.score_all(batch)[0]
    assert len(encoded) == 2
    del module.base_model.get_image_features
    for rollout, own in zip(batch, logprobs, strict=True):
        inputs = asked(learner.model.processor, rollout.images.decoded())
        assert inputs.pop("input_ids")[0].tolist() == list(rollout.prompt_ids)
        inputs.pop("attention_mask")
        if module.config.image_token_id in rollout.completion_ids:
            continue  # transformers takes it for an image's
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        for name in inputs.keys() & {"mm_token_type_ids", "token_type_ids"}:
            padding = (0, len(rollout.completion_ids))
            inputs[name] = torch.nn.functional.pad(inputs[name], padding)
        with torch.no_grad():
            logits = module(input_ids=ids, **inputs, use_cache=False).logits[0]
        expected = logits[len(rollout.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = expected.gather(1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]
        torch.testing.assert_close(own[: len(expected)], expected, atol=1e-5, rtol=1e-5)


def test_other_images_have_other_scores(model):
    learner = GRPOLearner(model, config(), CPU)
    batch = groups(learner)[:3]
    other = [replace(rollout, images=Images((png(BLUE),), "row 1")) for rollout in batch]
    ours, others = (learner.model.score_all(rollouts)[0] for rollouts in (batch, other))
    assert (ours - others).abs().max() > 1e-3


def test_equal_prompts_with_other_images_share_nothing(model):
    learner = GRPOLearner(model, config(), CPU)
    batch = groups(learner)[:2]
    other = [replace(rollout, images=Images((png(BLUE),), "row 1")) for rollout in batch]
    apart = [learner.model.score_all(rollouts)[0] for rollouts in (batch, other)]
    together = learner.model.score_all([*batch, *other])[0]
    torch.testing.assert_close(together, torch.cat(apart), atol=1e-5, rtol=1e-5)


def test_features_in_a_list_are_those_of_images(tmp_path):
    """LLaVA-NeXT's and -OneVision's towers return a list, each element of its own length."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2} | sizes
    tower = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14} | sizes
    torch.manual_seed(0)
    module = LlavaNextForConditionalGeneration(
        LlavaNextConfig(text_config=text, vision_config=tower, image_grid_pinpoints=[[28, 56]], image_token_index=63)
    ).eval()
    pixels = {"pixel_values": torch.randn(2, 3, 3, 28, 28), "image_sizes": torch.tensor([[28, 56], [50, 28]])}
    with torch.no_grad():
        lengths = [len(image) for image in module.get_image_features(**pixels).pooler_output]
        assert lengths[0] != lengths[1]
        prompt = [5, *[63] * lengths[0], 6, *[63] * lengths[1], 7]
        ids = torch.tensor([[*prompt, 8, 9], [*prompt, 9, 10]])
        states = states_with_images(module, ids, pixels, len(prompt))
        for row, own in zip(ids, states, strict=True):
            expected = module.base_model(row[None], **pixels).last_hidden_state[0]
            torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


def test_version_that_would_leave_encoded_images_unread_is_refused(model, monkeypatch):
    learner = GRPOLearner(model, config(), CPU)
    monkeypatch.setattr(learner.model.module.base_model, "forward", lambda input_ids, **kwargs: None)
    with pytest.raises(RunError, match="this version of transformers takes no encoded images"):
        learner.model.score_all(groups(learner))


@pytest.mark.parametrize("train_vision", [False, True])
def test_towers_learn_if_they_are_to(model, train_vision):
    learner = GRPOLearner(model, config(train_vision=train_vision, group_size=3), CPU)
    before = {name: parameter.clone() for name, parameter in learner.model.module.named_parameters()}
    learner.learn(groups(learner))
    changed = {n for n, parameter in learner.model.module.named_parameters() if not parameter.equal(before[n])}
    assert any(not of_language_model(name) for name in changed) == train_vision
    assert any(of_language_model(name) for name in changed)


@pytest.mark.parametrize("train_vision", [False, True])
def test_run_goes_on_with_the_towers_that_learned(model, tmp_path, train_vision):
    learner = GRPOLearner(model, config(train_vision=train_vision, group_size=3), CPU)
    learner.learn(groups(learner))
    learner.save(tmp_path)
    other = GRPOLearner(str(tmp_path), config(train_vision=not train_vision), CPU)
    with pytest.raises(RunError, match=r"\d+ tensors learned in that run, and \d+ now: is --train-vision as it was\?"):
        other.load_state(tmp_path)


def test_towers_whose_first_images_come_later_are_offloaded_as_well(model):
    images, weights = groups(GRPOLearner(model, config(), CPU)), []
    text = [replace(rollout, images=None, prompt_ids=[5, 6]) for rollout in images]
    for offload in (False, True):
        learner = GRPOLearner(model, config(train_vision=True, group_size=3, offload_optimizer=offload), CPU)
        learner.max_mismatch = None  # no engine samples anew after each step
        for batch in (text, images, images):
            learner.learn(batch)
        weights.append(weights_of(learner))
    assert all(weights[1][name].equal(tensor) for name, tensor in weights[0].items())


def learn(folder, batches):
    for model, batch in batches.items():
        learner = GRPOLearner(model, config(group_size=3, max_grad_norm=0.01, train_vision=True), CPU)
        use_sgd(learner)
        results = [numbers(learner.learn(batch))], weights_of(learner)
        if learner.model.rank == 0:
            torch.save(results, Path(model) / f"images-{learner.model.ranks}.pt")


@pytest.mark.slow
def test_two_ranks_learn_from_images_what_one_learns(tmp_path):
    batches = {}
    for family in ("Qwen3VL", "Gemma3"):
        model = build(family, tmp_path / family, loudness=1)
        learner = GRPOLearner(model, config(), CPU)
        text = Rollout([5, 6], [7, 8], [0.0] * 2)  # beside groups with images
        text = replace(text, logprobs=learner.model.score_all([text])[0][0].tolist())
        batches[model] = groups(learner) + [replace(text, reward=float(i)) for i in range(3)]
    learn(tmp_path, batches)
    on_ranks(2, learn, tmp_path, batches)
    for model in batches:
        assert_same([torch.load(f"{model}/images-{ranks}.pt") for ranks in (1, 2)])


# --- Runs with an engine ----------------------------------------------------------------------------------------------

SIZE = ["--tensor-parallel-size", 1, "--prompts-per-step", 4, "--group-size", 4, "--max-tokens", 8, "--output", "run"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Questions about images, as a file of JSON lines."""
    folder = tmp_path_factory.mktemp("data")
    lines = []
    for i, row in enumerate(squares("train")[:12]):
        row["images"][0].save(folder / f"{i}.png")
        lines.append(json.dumps(row | {"images": [str(folder / f"{i}.png")]}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"


@cpu_only
@pytest.mark.long
def test_run_learns_colours(script, tmp_path):
    flags = "--topology", "separate", "--tensor-parallel-size", 1, "--output", "run"
    text = script("train_grpo.py", "--task", "colour", *flags, PYTHONPATH=str(ROOT / "tests")).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    before, after = map(float, re.search(r"eval (\S+) -> (\S+)$", text.strip()).groups())
    assert before < 0.6
    assert after > 0.9
    assert max(row.get("logprobs/mismatch", 0) for row in metrics_of(tmp_path / "run")) < 1e-5


@cpu_only
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        pytest.param("Qwen2_5_VL", ["--max-staleness", 2, "--train-vision"], marks=pytest.mark.slow),
        pytest.param("Qwen3VL", ["--topology", "shared", "--train-vision", "--engines", 2], marks=pytest.mark.long),
        pytest.param("Gemma3", ["--topology", "separate"], marks=pytest.mark.long),
    ],
)
def test_every_sync_is_proven_by_answers_about_images(script, tmp_path, data, family, flags):
    model = build(family, tmp_path / "model")
    task = ["--dataset", data, "--reward", "trainer.tasks.rewards:exact", "--model", model, "--steps", 3]
    text = script("train_grpo.py", *task, *SIZE, "--learning-rate", 1e-3, *flags).finish()
    assert text.splitlines()[-1].startswith("OK: reward "), text
    assert max(row["logprobs/mismatch"] for row in metrics_of(tmp_path / "run")) < 1e-5


FORGETFUL = """
import train_grpo
from trainer.rollouts.engine import EngineActor
from trainer.rollouts.options import engine_options
from trainer.run.arguments import parse
from trainer.run.session import run_main
from trainer.topologies.base import Topology

class Forgetful(EngineActor):
    async def _reset_caches(self):
        await self.llm.reset_prefix_cache()

Topology.engine_class = Forgetful
run_main(train_grpo.main, parse(train_grpo.Arguments, "forgetful"))
"""


@cpu_only
@pytest.mark.long
def test_engine_that_keeps_what_a_tower_made_is_found(script, tmp_path, data):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "forgetful.py").write_text(FORGETFUL)
    reward = "def length(completions, **_): return [len(messages[0]['content']) for messages in completions]"
    (tmp_path / "functions.py").write_text(reward)
    rows = {"dataset": str(data), "dataset_split": "train[:4]", "reward": ["functions:length"]}
    task = [*settings_of(tmp_path, **rows), "--steps", 3]
    model = build("Qwen2_5_VL", tmp_path / "model")
    flags = ["--topology", "separate", "--model", model, "--train-vision", "--learning-rate", 1e-2, *SIZE]
    text = script(tmp_path / "scripts" / "forgetful.py", *task, *flags, PYTHONPATH=str(ROOT)).finish()
    assert text.splitlines()[-1].startswith("error: the engine's log-probabilities are "), text


@cpu_only
@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-model-len", 6], "longer than the maximum model length of 6"),
        (["--engine-args", '{"limit_mm_per_prompt": {"image": 0}}'], "At most 0 image"),
    ],
)
def test_images_that_an_engine_cannot_take_end_the_run(script, tmp_path, data, flags, message):
    task = [
        "--dataset",
        data,
        "--reward",
        "trainer.tasks.rewards:exact",
        "--model",
        build("Qwen2_5_VL", tmp_path / "model"),
    ]
    text = script("train_grpo.py", "--topology", "separate", *task, *SIZE, *flags).finish()
    assert message in text.splitlines()[-1], text


@pytest.mark.parametrize("name", ["max_pixels", "resized_height"])
def test_size_of_an_image_in_its_part_is_not_dropped(paths, name):
    part = {"type": "image", "image": paths[0], name: 3136}
    with pytest.raises(TaskError, match=f"^row 1: {name} of an image would not count"):
        take_images({"prompt": [user(part)]}, "row 1")


@pytest.mark.parametrize("token", ["image_token", "boi_token", "video_token"])
def test_text_that_would_stand_for_an_image_names_its_row(model, tmp_path, paths, token):
    if not (text := getattr(AutoTokenizer.from_pretrained(model), token, None)):
        return
    rows = [{"prompt": [{"role": "user", "content": "?"}], "images": paths[:1], "answer": ""}]
    task_of(tmp_path, rows).tokenized(model)
    for prompt in (f"What is {text}?", [{"role": "user", "content": f"What is {text}?"}]):
        task = task_of(tmp_path, [*rows, {"prompt": prompt, "answer": ""}])
        with pytest.raises(TaskError, match=re.escape(f"row 1 of train: the text of the prompt has {text}, which")):
            task.tokenized(model)


def test_option_that_only_the_engines_processor_would_get_is_refused():
    assert engine_options('{"max_num_seqs": 2}') == '{"max_num_seqs": 2}'
    with pytest.raises(ValueError, match=r"mm_processor_kwargs .* belongs in the model's preprocessor_config.json"):
        engine_options('{"mm_processor_kwargs": {"max_pixels": 3136}}')
