"""Mutants: each is one change of the source, and it is found again by its lines."""

from tools.mutants import ROOMS, ROOT, Changes, Mutant, find_lua_changes

SOURCE = '''"""1 and 2."""
if TYPE_CHECKING:
    import x

def add(one: int | None, *, strict: bool = True) -> "int | None":
    """Return 1."""
    log.info("%d", one + 1)
    assert one > 0
    self.total += zip(one, strict=True)
    for name in ("é", one):
        if name is not None:
            continue
    return not one and 5
'''


def test_each_change_is_made_where_it_says() -> None:
    changed = [SOURCE[:start] + text + SOURCE[end:] for start, end, text in Changes(SOURCE).found]
    pairs = [pair for one in changed for pair in zip(SOURCE.splitlines(), one.splitlines(), strict=True)]
    lines = {(before.strip(), after.strip()) for before, after in pairs if before != after}
    assert lines == {
        ('def add(one: int | None, *, strict: bool = True) -> "int | None":',
         'def add(one: int | None, *, strict: bool = False) -> "int | None":'),
        ("self.total += zip(one, strict=True)", "self.total -= zip(one, strict=True)"),
        ("self.total += zip(one, strict=True)", "pass"),
        ("if name is not None:", "if name is None:"),
        ("continue", "break"),
        ("return not one and 5", "return None"),
        ("return not one and 5", "return not one or 5"),
        ("return not one and 5", "return one and 5"),
        ("return not one and 5", "return not one and 6"),
    }  # fmt: skip


def test_comments_of_a_script_stay() -> None:
    source = "if a == 1 then return 0 end -- a == 1\nredis.call('DEL', a)\n"
    changes = [source[:start] + text + source[end:] for start, end, text in find_lua_changes(source)]
    assert [one.splitlines() for one in changes] == [
        ["if a ~= 1 then return 0 end -- a == 1", "redis.call('DEL', a)"],
        ["local _ = 0 -- a == 1", "redis.call('DEL', a)"],
        ["if a == 1 then return 0 end -- a == 1", "local _ = 0"],
    ]


def test_a_mutant_is_found_by_its_lines_and_says_where_they_are_gone() -> None:
    second = Mutant("a.py", "    x = 1", "    x = 2", nth=1)
    assert second.apply("    x = 1\n        x = 1\n    x = 1\n") == "    x = 1\n        x = 1\n    x = 2\n"
    assert second.apply("    x = 1\n    x = 12\n") is None


def test_the_tests_of_every_room_exist() -> None:
    """Else pytest fails where it begins, and each mutant counts as noticed."""
    named = [name for room in ROOMS.values() for name in room.tests + room.tests_of_modules]
    assert [name for name in named if not (ROOT / name).exists()] == []
