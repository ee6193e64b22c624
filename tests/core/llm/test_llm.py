"""`ml4core.LLM`: prompts of every form, what ends an answer, what one request does to others."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ml4core
from ml4core.api import FaultError
from ml4core.engine.errors import ArgumentsError, RequestError
from ml4core.engine.sampling_params import SamplingParams
from ml4core.serving.answers import Answers
from ml4core.serving.errors import EngineClosedError
from ml4core.serving.llm import LLM

pytestmark = pytest.mark.usefixtures("probed_once")

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TEXTS = ["Hello", "One two three four five", "A"]


def test_the_package_brings_it_without_importing_torch() -> None:
    code = (
        "import sys, ml4core\n"
        "assert {'LLM', 'AsyncLLM', 'SamplingParams'} <= set(dir(ml4core))\n"
        "assert ml4core.SamplingParams(top_k=3).top_k == 3\n"
        "assert not {'torch', 'mistral_common'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert ml4core.LLM is LLM
    with pytest.raises(AttributeError, match="nothing"):
        _ = ml4core.nothing


def test_the_example_of_the_readme_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (example,) = [block for block in blocks if "LLM(" in block]
    exec(compile(example.replace('"MODEL"', f'"{folder}"'), "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) >= 3


def test_prompts_of_every_form(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Hello")
    (plain,) = llm.generate("Hello", GREEDY)
    forms: list[Any] = ["Hello", {"prompt": "Hello"}, {"prompt_token_ids": ids}]
    assert [done.outputs for done in llm.generate(forms, GREEDY)] == [plain.outputs] * 3
    assert (plain.prompt, plain.prompt_token_ids, plain.finished) == ("Hello", ids, True)
    assert plain.outputs[0].text == tokenizer.decode(plain.outputs[0].token_ids)
    assert len(plain.outputs[0].token_ids) == 8
    assert plain.outputs[0].finish_reason == "length"
    chat = [{"role": "user", "content": "Hi"}]
    (said,) = llm.chat(chat, GREEDY)
    same: Any = {"prompt_token_ids": tokenizer.encode_chat(chat)}
    assert [said.outputs] == [done.outputs for done in llm.generate(same, GREEDY)]
    assert [done.outputs for done in llm.chat([chat, chat], GREEDY)] == [said.outputs] * 2
    assert llm.generate([], GREEDY) == []


def test_answers_do_not_depend_on_what_runs_beside_them(llm: LLM) -> None:
    alone = [llm.generate(text, GREEDY)[0].outputs for text in TEXTS]
    params = [replace(GREEDY, max_tokens=2), GREEDY, replace(GREEDY, temperature=1.0, seed=1)]
    together = llm.generate(TEXTS, params)
    assert together[0].outputs[0].token_ids == alone[0][0].token_ids[:2]
    assert together[1].outputs == alone[1]
    assert llm.generate(TEXTS[2], params[2])[0].outputs == together[2].outputs
    ids = [done.request_id for done in together]
    assert len(set(ids)) == 3


def test_a_stop_string_ends_one_answer_alone(llm: LLM, held_pages: Any) -> None:
    whole = [done.outputs[0] for done in llm.generate(TEXTS, GREEDY)]
    decode = llm.get_tokenizer().decode
    # From the middle of the fourth token into the fifth: across a border.
    start, end = len(decode(whole[0].token_ids[:4])), len(decode(whole[0].token_ids[:5]))
    stop = whole[0].text[start - 1 : end - 1]
    assert whole[0].text.index(stop) == start - 1
    params = [replace(GREEDY, stop=(stop,)), GREEDY, GREEDY]
    stopped, *others = [done.outputs[0] for done in llm.generate(TEXTS, params)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.text == whole[0].text[: start - 1]
    assert stopped.token_ids == whole[0].token_ids[:5]
    assert others == whole[1:]
    assert held_pages(llm.engine) == 0
    assert not llm.engine.core.has_work
    kept = replace(params[0], include_stop_str_in_output=True)
    assert llm.generate(TEXTS[0], kept)[0].outputs[0].text == whole[0].text[: end - 1]
    passed_over = replace(params[0], min_tokens=5)
    assert llm.generate(TEXTS[0], passed_over)[0].outputs[0] == whole[0]


def test_ids_that_end_an_answer(llm: LLM) -> None:
    (whole,) = llm.generate("Hello", GREEDY)[0].outputs
    last = whole.token_ids[2]
    assert last not in whole.token_ids[:2]
    (done,) = llm.generate("Hello", replace(GREEDY, stop_token_ids=(last,)))[0].outputs
    assert (done.token_ids, done.finish_reason) == (whole.token_ids[:3], "stop")
    assert done.stop_reason == last
    assert done.text == llm.get_tokenizer().decode(whole.token_ids[:2])
    eos = llm.get_tokenizer().eos_id
    forced = replace(GREEDY, allowed_token_ids=(eos,), ignore_eos=False)
    (done,) = llm.generate("Hello", forced)[0].outputs
    assert (done.token_ids, done.text) == ([eos], "")
    assert (done.finish_reason, done.stop_reason) == ("stop", None)


def test_text_as_asked(llm: LLM) -> None:
    special = replace(GREEDY, allowed_token_ids=(3,), max_tokens=2)
    assert llm.generate("a", special)[0].outputs[0].text == ""
    named = replace(special, skip_special_tokens=False)
    assert llm.generate("a", named)[0].outputs[0].text == "[INST][INST]"
    silent = llm.generate("a", replace(GREEDY, detokenize=False))[0].outputs[0]
    assert (silent.text, len(silent.token_ids)) == ("", 8)


def test_several_answers_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (done,) = llm.generate("Hello you", replace(params, ignore_eos=True))
    assert [one.index for one in done.outputs] == [0, 1, 2]
    assert len({tuple(one.token_ids) for one in done.outputs}) == 3
    for one in done.outputs:
        assert one.logprobs is not None
        assert len(one.logprobs) == 4
        made = [entry[token] for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
        assert one.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in made))
        ranks = [entry.rank for entry in one.logprobs[0].values()]
        assert {1, 2} <= set(ranks)
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    told = done.prompt_logprobs[1]
    assert told is not None
    assert done.prompt_token_ids[1] in told
    assert "Hello" in {entry.decoded_token for entry in told.values()}


def test_several_answers_wait_for_a_full_pool(llm: LLM, folder: Path) -> None:
    """Each of them fits, not all together: they take turns, and so does who is beside them."""
    pages = 64 // 16 + 2  # one whole context, the null page and one to spare
    room = pages * 16 * llm.engine.kv_plan.bytes_per_token
    several = replace(GREEDY, n=4, temperature=1.0, seed=5, max_tokens=24)
    params = [several, replace(GREEDY, max_tokens=24)]
    want = llm.generate(["One", "Hello"], params)
    flags: dict[str, Any] = {"max_model_len": 64, "block_size": 16, "max_num_seqs": 4}
    with LLM(str(folder), kv_cache_memory_bytes=room, **flags) as small:
        assert small.engine.kv_plan.tokens < 4 * 24
        got = small.generate(["One", "Hello"], params)
        assert small.engine.core.stats().preemptions > 0
        with pytest.raises(RequestError, match=r"n: 5 \(works: at most 4: --max-num-seqs\)"):
            small.generate("One", replace(several, n=5))
    assert [one.outputs for one in got] == [one.outputs for one in want]


def test_nothing_runs_unless_all_prompts_can(llm: LLM) -> None:
    before = llm.engine.core.stats().steps
    bad: list[tuple[Any, Any, dict[str, Any], str]] = [
        (["a", {"prompt_token_ids": [1] * 128}], GREEDY, {}, "prompt 1: 128 tokens"),
        (["a", {"prompt_token_ids": [9999]}], GREEDY, {}, "prompt 1, token 0: 9999"),
        (["a", ""], GREEDY, {}, "prompt 1: empty"),
        (["a", {"prompt_token_ids": []}], GREEDY, {}, "prompt 1: empty"),
        (["a", 3], GREEDY, {}, "prompt 1: 3"),
        (["a", [1, 2]], GREEDY, {}, "prompt_token_ids"),
        (7, GREEDY, {}, "prompts: 7"),
        ({"prompt_token_ids": "12"}, GREEDY, {}, "prompt_token_ids: 12"),
        ({"prompt_token_ids": [1.5]}, GREEDY, {}, "prompt_token_ids: 1.5"),
        ({"text": "a"}, GREEDY, {}, "prompt, key: text"),
        ({"prompt": "a", "cache_salt": ""}, GREEDY, {}, "cache_salt"),
        (["a", "b"], [GREEDY], {}, "sampling_params: a list of 1 (works: one, or a list of 2)"),
        ("a", {"max_tokens": 3}, {}, "sampling_params"),
        ("a", replace(GREEDY, stop_token_ids=(9999,)), {}, "stop_token_ids: 9999"),
        ("a", replace(GREEDY, n=5, temperature=1.0), {}, "n: 5 (works: at most 4"),
        ("a", GREEDY, {"priority": 1}, "priority: 1 (works: 0, or"),
        (["a", "b"], GREEDY, {"priority": [0]}, "priority: a list of 1"),
    ]
    for prompts, params, more, told in bad:
        with pytest.raises(RequestError) as refused:
            llm.generate(prompts, params, **more)
        assert told in str(refused.value)
    for messages in ("hi", [], [["hi"]], [{"role": "nobody", "content": "hi"}]):
        with pytest.raises(RequestError, match="messages"):
            llm.chat(messages, GREEDY)  # type: ignore[arg-type]
    assert llm.engine.core.stats().steps == before
    assert llm.generate("a", GREEDY)[0].finished


def test_short_contexts_leave_room_for_a_whole_batch(llm: LLM) -> None:
    long: Any = [{"prompt_token_ids": [7] * 100}] * 4
    before = llm.engine.core.stats()
    llm.generate(long, GREEDY)
    after = llm.engine.core.stats()
    assert after.preemptions == before.preemptions == 0
    assert after.steps - before.steps <= 8


def test_a_call_that_breaks_off_leaves_nothing(
    llm: LLM, held_pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = llm.generate(TEXTS, GREEDY)
    with monkeypatch.context() as patch:

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        patch.setattr("ml4core.serving.answers.Answers.output", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS, [replace(GREEDY, max_tokens=1), GREEDY, GREEDY])
    assert held_pages(llm.engine) == 0
    assert [d.outputs for d in llm.generate(TEXTS, GREEDY)] == [d.outputs for d in want]


def test_flags(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="did you mean max_model_len"):
        LLM(str(folder), max_modellen=3)
    with pytest.raises(ArgumentsError, match="--block-size"):
        LLM(str(folder), block_size=0)
    with LLM(str(folder), max_model_len=64, max_num_seqs=1, scheduling_policy="priority") as llm:
        ended: list[str | None] = []
        output = Answers.output

        def recorded(self: Answers) -> Any:
            ended.append(output(self).prompt)
            return output(self)

        monkeypatch.setattr(Answers, "output", recorded)
        done = llm.generate(["a", "b", "c"], GREEDY, priority=[5, 1, 3])
        assert ended == ["b", "c", "a"]
        assert [one.prompt for one in done] == ["a", "b", "c"]
        assert llm.report()["backend"]["name"] == "cpu"
    with pytest.raises(EngineClosedError, match="closed"):
        llm.generate("a")
    llm.close()


def test_a_fault_ends_the_engine_and_is_told_once(
    folder: Path, held_pages: Any, spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        "ml4core.registry.notify_fault", lambda fault, manager: told.append(fault.code)
    )
    with LLM(str(folder), max_model_len=64) as llm:
        spoil(llm.engine)
        for _ in range(2):
            with pytest.raises(FaultError):
                llm.generate(TEXTS, GREEDY)
        assert told == ["nan"]
        assert held_pages(llm.engine) == 0
