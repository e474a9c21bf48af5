"""What is refused before anything starts: flags and models.

pytest tests/test_refusals.py
"""

import json
import shutil

import pytest
from conftest import arguments_of

import train_distill
import train_grpo
import train_ppo
from trainer.errors import RunError
from trainer.run.models import choose_models


@pytest.mark.parametrize(
    ("script", "given", "message"),
    [
        # What cannot be.
        (train_grpo, "--group 4", "unrecognized arguments: --group 4"),  # no abbreviations
        (train_grpo, "--updates 2", "unrecognized arguments: --updates 2"),
        (train_grpo, "--clip-low 0.1", "unrecognized arguments: --clip-low 0.1"),  # a setting is no flag
        (train_grpo, "--num-epochs 0", "--num-epochs: Input should be greater than or equal to 1, not 0"),
        (train_grpo, "--top-p 0", "--top-p: Input should be greater than 0, not 0"),
        (train_grpo, "--min-p 1", "--min-p: Input should be less than 1, not 1"),
        (train_grpo, "--timeout 0", "--timeout: Input should be greater than 0, not 0"),
        (train_grpo, "--timeout inf", "--timeout: Input should be a finite number, not inf"),
        (train_grpo, "--timeout 3e6", "--timeout: Input should be less than or equal to 1000000, not 3e6"),
        (train_grpo, "--reward-weights 1 nan", "--reward-weights: Input should be a finite number, not nan"),
        (train_grpo, "--seed 1732612345678", "--seed: Input should be less than 4294967296, not 1732612345678"),
        (train_grpo, "--model ", "--model is empty: is a variable of the shell not set?"),
        (train_grpo, "--reward mine:right ", "--reward is empty: is a variable of the shell not set?"),
        (train_grpo, "--resume nowhere", "--resume nowhere: not a run folder"),
        # What would do nothing.
        (train_grpo, "--eval-samples 4", "--eval-samples needs --eval-every"),
        (train_grpo, "--eval-share 0.5 --eval-split a", "--eval-share is no share of --eval-dataset or --eval-split"),
        (train_grpo, "--max-tool-iterations 5", "--max-tool-iterations needs --tools or --environment"),
        (train_grpo, "--loss cispo --mismatch-correction tis", "--mismatch-correction does nothing with --loss cispo"),
        (train_grpo, "--engine-url http://a:1 --engines 2", "--engines is for engines that a run starts"),
        (train_grpo, "--group-size 1", "--group-size is at least 2 in GRPO"),
        (train_grpo, '--engine-args {"max_model_len":64}', "max_model_len has a flag of its own, --max-model-len"),
        (train_grpo, '--engine-args {"quantization":"fp8"}', "quantization has a flag of its own, --quantization"),
        *(
            (
                train_grpo,
                f'--engine-args {{"speculative_config":{draft}}}',
                f"no sync brings the draft's weights {named}",
            )
            for draft, named in (
                ('{"model":"small"}', "(speculative_config: small)"),
                ('{"method":"mtp"}', "(speculative"),
            )
        ),
        (train_grpo, '--engine-args {"speculative_config":"ngram"}', "must be an object, and is 'ngram'"),
        (train_distill, "--group-size 1 --reward-coef 1", "--reward-coef needs a --group-size of 2 or more"),
    ],
)
def test_flags_that_cannot_be_or_would_do_nothing_are_usage_errors(flags, capsys, script, given, message):
    with pytest.raises(SystemExit):
        flags(script, *given.split(" "))
    assert message in capsys.readouterr().err


def test_drafts_without_weights_are_taken(flags):
    for draft in ('{"method":"ngram","num_speculative_tokens":4}', '{"method":"suffix"}', '{"model":"ngram"}', "null"):
        flags(train_grpo, "--engine-args", f'{{"speculative_config":{draft}}}')


def test_groups_of_one_are_for_losses_that_compare_none(flags):
    assert [flags(script, "--group-size", 1).sampling.group_size for script in (train_ppo, train_distill)] == [1, 1]


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        (
            "adapter_config.json",
            {"base_model_name_or_path": "some/model"},
            "has adapters: give what they adapt, some/model, or merge them into it",
        ),
        (
            "config.json",
            {"quantization_config": {"quant_method": "gptq"}},
            r"is quantized \(gptq\): give the unquantized",
        ),
        (
            "config.json",
            {"model_type": "qwen", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}},
            r"is of the type qwen, for which transformers has no class \.\.\.ForCausalLM; code that comes with a model",
        ),
        ("config.json", {"model_type": "t5"}, "is of the type t5, for which"),
        ("config.json", {"model_type": None}, "not a model's folder"),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Tokenizer", None]}},
            "cannot load the tokenizer of .* contains custom code",
        ),
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "mine.Model"}, "quantization_config": None}, None),
    ],
)
def test_model_that_cannot_be_trained_is_refused_by_its_settings(model, tmp_path, monkeypatch, file, settings, message):
    """Without a question on the screen: transformers would ask whether to run a model's own code."""
    monkeypatch.setattr("builtins.input", pytest.fail)
    folder = shutil.copytree(model, tmp_path / "model")
    kind = {"model_type": "llama"} if file == "tokenizer_config.json" else {}  # which has no tokenizer of its own
    for name, changes in (("config.json", kind), (file, settings)):
        old = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(old | changes))
    args = arguments_of(train_grpo, model=str(folder))
    if message:
        with pytest.raises(RunError, match=message):
            choose_models(tmp_path, args, "cpu")
    else:
        assert choose_models(tmp_path, args, "cpu")[0].loaded == str(folder)
