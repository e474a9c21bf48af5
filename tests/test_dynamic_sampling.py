"""Dynamic sampling: groups of equal rewards are replaced by groups of other prompts. Without an engine.

pytest tests/test_dynamic_sampling.py
"""

from pathlib import Path

import pytest
from fakes import Engines, sums, write_lines

from trainer.learning.config import SamplingConfig
from trainer.rollouts.rollouts import AheadArguments, Rollouts


def its_number(text, i):
    """A completion that is the prompt's text, or where that is a "?" its own number."""
    return str(i) if text == "?" else text


@pytest.mark.parametrize(
    ("rounds", "prompts", "asked", "differ"),
    [
        (0, "a" * 12, {4}, {0}),
        (9, "?" * 12, {4}, {4}),
        (1, "a" * 12, {8}, {0}),
        (9, "a" * 12, {12}, {0}),  # then all have been tried
        (9, "a" * 10 + "??", None, {2}),
        (1, "aaaa????????", None, {3, 4}),  # one of the others may be equal as well
        (9, "aaaa????????", None, {4}),
    ],
)
def test_groups_of_equal_rewards_are_replaced_by_other_prompts(load, rounds, prompts, asked, differ):
    Path("graded.py").write_text(
        "def reward(completions, trainer_state, log_metric, **_):\n"
        "    log_metric('steps done', trainer_state.global_step)\n"
        "    return [text == '1' for text in completions]\n"
    )
    write_lines("rows.jsonl", *({"prompt": prompt, "number": i} for i, prompt in enumerate(prompts)))
    task = load("--prompts", "rows.jsonl", "--reward", "graded:reward", "--prompts-per-step", 4)
    for row in task.rows:
        row.prompt_ids = list(map(ord, row.prompt))
    config, args = SamplingConfig(), AheadArguments(dynamic_sampling=rounds)

    def batch_of(engines, step):
        return Rollouts(engines, task, config, step - 1, args).take(step)

    def content(batch):
        return [(group.row, [(own.text, own.reward) for own in group.rollouts]) for group in batch.groups]

    def seeds_of(engine):
        return [options["seed"] for call in engine.calls for options in call.sampling]

    seen, counts, seeds = set(), set(), []
    for step in range(1, 20):
        engine = Engines(its_number, version=step - 1)
        batch = batch_of(engine, step)
        kept, first = [group.row for group in batch.groups], task.draw(step)
        assert len({row.columns["number"] for row in kept}) == 4
        assert all(new is old for new, old in zip(kept, first, strict=True) if old.prompt == "?")  # and in its place
        replaced = sum(new is not old for new, old in zip(kept, first, strict=True))
        assert batch.metrics.get("dynamic_sampling/replaced", 0) == replaced
        assert batch.metrics["rewards/reward/mean"] == sum(sums(batch)) / 32
        assert batch.metrics["steps done"] == step - 1
        seen.add(len(engine.calls))
        counts.add(sum(not group.is_equal for group in batch.groups))
        seeds += seeds_of(engine)
        again = Engines(its_number, version=step - 1)
        batch_of(again, step)
        assert seeds_of(again) == seeds_of(engine)
        two = batch_of(Engines(its_number, its_number, version=step - 1), step)
        assert content(two) == content(batch)  # whatever was drawn before, and however many engines there are
    assert asked in (None, seen)
    assert counts == differ
    assert len(set(seeds)) == len(seeds)  # of all steps and rounds
    batch_of(engine := Engines(its_number, version=task.steps), task.steps + 1)
    assert len(engine.calls) == 4  # nobody learns from the batch that proves the last sync
