"""The campaign: whose turn it is, what is kept between runs, and what its page says."""

import sys
from pathlib import Path

from benchmarks import campaign
from benchmarks.campaign import PARTS, Figures, Part, Runner, Task, Told, choose_part, write_page
from sim.scenes import SCENES, LeftOutError, Played, Scene, play_scene

WORLD, FLAWS = PARTS[0], next(part for part in PARTS if part.name == "flaws")


def add(figures: Figures, part: Part, what: str, told: Told, seconds: float = 60.0) -> None:
    figures.add(part.name, Task(what, ["python", "-m", "x"], lambda *_: told, 5), told, seconds, "c1", "a machine")


def test_half_of_the_time_is_for_the_main_parts_and_each_of_them_gets_a_third(tmp_path: Path) -> None:
    figures, spent_s, order = Figures(tmp_path / "f.json", "s1"), dict[str, float](), []
    for _ in range(8):
        chosen = choose_part(figures, spent_s, 10_000.0, PARTS)
        assert chosen is not None
        order.append(chosen[0].name)
        spent_s[order[-1]] = spent_s.get(order[-1], 0.0) + 100.0
        add(figures, chosen[0], chosen[1][0].what, Told())
    assert order[::2] == ["world", "kills", "unlike", "world"]
    assert len({*order[1::2]}) == 4  # each that never had a turn comes before one that had


def test_a_piece_that_does_not_fit_into_the_time_that_is_left_is_not_begun(tmp_path: Path) -> None:
    whole = next(part for part in PARTS if part.name == "vllm")
    figures = Figures(tmp_path / "f.json", "s1")
    assert choose_part(figures, {}, whole.expected_s - 1, [whole]) is None
    spent_s = {"world": 60.0}
    for left_s, expected in ((2 * whole.expected_s - 61, "world"), (2 * whole.expected_s - 60, "vllm")):
        chosen = choose_part(figures, spent_s, left_s, [WORLD, whole])
        assert chosen is not None
        assert chosen[0].name == expected, "half of the time is for the main parts"


def test_rows_are_kept_and_those_of_older_sources_are_sums_but_for_their_findings(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    figures = Figures(path, "s1")
    add(figures, WORLD, "kafka", Told({"requests": 40}, seeds=[20_000_009]))
    add(figures, WORLD, "streams", Told({"requests": 2}, ["seeds 7: lost: r1: no result"], [7]))
    figures.write()
    again = Figures(path, "s1")
    assert again.count("world", "requests") == 42
    assert again.find_next_seed("world", "kafka") == 20_000_010
    later = Figures(path, "s2")
    assert (later.count("world", "requests"), later.earlier["world"]["requests"]) == (0, 40)
    assert [finding["seed"] for _, finding in later.list_open_findings()] == [5]
    assert "**open**" in write_page(later, 1.0)


def test_a_scene_that_is_known_to_fail_must_fail(tmp_path: Path) -> None:
    def fail(seed: int, directory: Path) -> Played:
        return Played(1, 0, [f"lost with {seed}"])

    def leave_out(seed: int, directory: Path) -> Played:
        raise LeftOutError("no Java")

    assert play_scene(Scene("a", "holds", fail), 3, tmp_path)["findings"] == ["lost with 3"]
    known = play_scene(Scene("a", "holds", fail, "L3"), 3, tmp_path)
    assert (known["findings"], known["known"]) == ([], ["lost with 3"])
    passed = play_scene(Scene("a", "holds", lambda *_: Played(1), "L3"), 3, tmp_path)
    assert "take the mark away" in passed["findings"][0]
    assert play_scene(Scene("a", "holds", leave_out), 3, tmp_path)["left_out"] == "no Java"


def test_names_of_scenes_are_distinct_and_none_is_part_of_another() -> None:
    """`python -m sim.scenes NAME` plays each scene whose name has this part."""
    names = [scene.name for scene in SCENES]
    assert [one for one in names if sum(one in other for other in names) != 1] == []


def test_what_a_command_printed_is_read(tmp_path: Path) -> None:
    told = campaign._read_world(7, "seed 9: 20 requests\n    lost: r1: gone\n60 requests, 4 kills, 1 findings, 9\n", 0)
    assert told == Told({"requests": 60, "kills": 4}, ["seeds 9: lost: r1: gone"], [10])
    resized = campaign._read_world(7, "60 requests, 4 kills, 0 findings, 9 requests/s, 31 starts and stops\n", 0)
    assert resized.counts == {"requests": 60, "kills": 4, "starts and stops": 31}
    assert "status 3: worse" in campaign._read_world(7, "bad\nworse\n", 3).findings[0]
    assert campaign._read_flaw("a flaw: 12 lost: r1: gone 4 s\n", 0).seeds == [12]
    assert campaign._read_flaw("a flaw: None  300 s\n", 0).findings
    checked = "719 passed, 151 deselected in 900.12s\nsanitize: avx512_bf16 passed; left out: none\n"
    assert campaign._read_status(checked, 0) == Told({"passed": 719}, [])
    assert campaign._read_status("FAILED a\n1 failed, 2 passed in 3 s\n", 1) == Told(
        {"failed": 1, "passed": 2}, ["FAILED a"]
    )
    assert campaign._read_status("newest: codex 0.2\n1 passed in 3 s\n", 0).told == ("codex 0.2",)


def test_commands_of_a_piece_run_side_by_side_and_tell_what_they_printed() -> None:
    def make(word: str) -> Task:
        return Task(
            word, [sys.executable, "-c", f"print('{word}')"], lambda output, status: Told(told=[output.strip()])
        )

    told = [(task.what, one.told) for task, one, _ in Runner().run_tasks([make("a"), make("b")])]
    assert told == [("a", ["a"]), ("b", ["b"])]
