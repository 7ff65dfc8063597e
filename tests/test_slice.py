"""The tool that counts what a chat crosses until its first token, on a stack of its own."""

from tools.slice import Function, measure_slice, merge_notes


def test_a_chat_is_followed_through_all_processes_to_its_first_token() -> None:
    found = measure_slice(num_chats=1)
    names = {function.name for functions in found.functions.values() for function in functions}
    assert {"accept_request", "BaseClient.__init__"} & names == {"accept_request"}, "the gateway's, after its start"
    assert {"Worker._claim_messages", "ServingEngine.add_request", "Worker._append"} <= names
    assert 0 < found.count_lines("core/penstock/worker/worker.py") < 842
    assert {one.process for one in found.passes} >= {"gateway", "worker prefill"}


def test_what_ran_in_some_of_the_chats_alone_does_not_count() -> None:
    file, passing = "core/penstock/names.py", ["gateway", "a place", "dumps"]
    notes = {
        "functions": [[file, 100, "always", [1, 2]], [file, 200, "once", [2]]],
        "passes": [[1, passing], [1, passing], [2, passing], [2, ["gateway", "another place", "loads"]]],
    }
    found = merge_notes([notes, {"functions": [[file, 200, "once", [1]]], "passes": []}], 2)
    assert found.functions == {file: [Function(file, 100, "always")]}
    assert [one.place for one in found.passes] == ["a place"]
