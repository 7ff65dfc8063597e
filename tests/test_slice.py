"""The tool that counts what a chat crosses until its first token, on a stack of its own."""

from types import CodeType

import penstock
from tools.rooms import PORTIONS
from tools.slice import ROOT, Function, _describe_code, measure_slice, merge_notes


def test_a_chat_is_followed_through_all_processes_to_its_first_token() -> None:
    found = measure_slice(num_chats=1)
    names = {function.name for functions in found.functions.values() for function in functions}
    assert {"accept_request", "BaseClient.__init__"} & names == {"accept_request"}, "the gateway's, after its start"
    assert {"Intake.claim_messages", "ServingEngine.add_request", "Worker._append"} <= names
    assert 0 < found.count_lines("worker/penstock/worker/worker.py") < 842
    assert [one.what for one in found.passes if one.process == "gateway" and not one.is_walk] == [
        "from_json", "model_validate ChatBody", "model_dump_json Request",
    ]  # fmt: skip
    prefill = [one.what for one in found.passes if one.process == "worker prefill"]
    # To the template's process, once more where that takes long.
    num_again = prefill[2:].count("dumps")
    assert prefill == ["model_validate_json Request", "dumps", *["dumps"] * num_again]
    assert {one.what for one in found.passes if one.is_walk} == {"walk measure_prompts", "walk chain_prompt"}
    # Decode may read the job before or after the first token is with the client.
    assert len([one for one in found.passes if one.process != "worker decode"]) == 7 + num_again


def test_the_packages_files_count_and_not_the_environments_whatever_the_repository_is_called() -> None:
    def find_function(path: str) -> CodeType:
        made: CodeType = compile("def f(): ...", path, "exec").co_consts[0]
        return made

    described = {_describe_code(find_function(f"{folder}/a/b.py")) for folder in penstock.__path__}
    assert described == {f"{portion.name}/penstock/a/b.py" for portion in PORTIONS}
    assert not _describe_code(find_function(f"{ROOT}/.venv/lib/penstock/b.py")), "as in a clone called penstock"


def test_what_ran_in_some_of_the_chats_alone_does_not_count() -> None:
    file, passing = "core/penstock/names.py", ["gateway", "a place", "dumps"]
    notes = {
        "functions": [[file, 100, "always", [1, 2]], [file, 200, "once", [2]]],
        "passes": [[1, passing], [1, passing], [2, passing], [2, ["gateway", "another place", "loads"]]],
    }
    found = merge_notes([notes, {"functions": [[file, 200, "once", [1]]], "passes": []}], 2)
    assert found.functions == {file: [Function(file, 100, "always")]}
    assert [one.place for one in found.passes] == ["a place"]
