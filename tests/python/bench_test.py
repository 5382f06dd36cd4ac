"""Parts of `epikv bench` that need no daemon."""

from epikv.bench import harness
from epikv.bench.load import random_prompt
from epikv.bench.scrape import parse

PAGE = """\
# HELP epikv_step_tokens_total Tokens run, step by step.
# TYPE epikv_step_tokens_total counter
epikv_step_tokens_total{model="m",phase="decode"} 12
epikv_step_tokens_total{phase="prefill",model="m"} 3e+01
epikv_requests_running{model="m"} 2
process_open_fds 7
"""


def test_pages_are_read_and_subtracted() -> None:
    page = parse(PAGE)
    assert page.value("epikv_step_tokens_total", phase="decode") == 12
    assert page.value("epikv_step_tokens_total", phase="prefill") == 30
    assert page.value("epikv_requests_running") == 2
    assert page.value("process_open_fds") == 7
    assert page.value("epikv_step_tokens_total") == 0
    later = parse(PAGE.replace("} 12", "} 20") + 'epikv_new_total{model="m"} 1\n') - page
    assert later.value("epikv_step_tokens_total", phase="decode") == 8
    assert later.value("epikv_new_total") == 1


def test_prompts_are_repeatable() -> None:
    assert random_prompt(50, 10, 1) == random_prompt(50, 10, 1) != random_prompt(50, 10, 2)
    assert set(random_prompt(500, 10, 1)) == set(range(10))


def test_files_are_made_again_when_what_they_hold_changes() -> None:
    one, same, other = (harness.cached("m", {"layers": n}) for n in (1, 1, 2))
    assert one == same != other and one.name.startswith("m-")
