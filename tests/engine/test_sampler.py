import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampler import Draw, sample, uniform
from penstock.messages import Sampling


def _draws(num: int, **sampling: float) -> list[Draw]:
    return [Draw(Sampling.model_validate(sampling), seed=3, position=i) for i in range(num)]


def test_these_numbers_never_change() -> None:
    """A rolling upgrade may hand a request to a newer worker: both must draw the same."""
    drawn = [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(2**63 - 1, 4095)]
    assert drawn == [0.6524484863740322, 0.7012121095215252, 0.36818951565166946, 0.5268763636163535]


def test_uniform_is_uniform() -> None:
    values = torch.tensor(
        [uniform(seed, position) for seed in range(200) for position in range(200)], dtype=torch.float64
    )
    counts = torch.histc(values, bins=20, min=0, max=1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 45  # chi-square, 19 degrees of freedom: p < 0.001
    assert len(set(values.tolist())) == 40_000
    grid = values.view(200, 200)
    assert abs(float(torch.corrcoef(grid.flatten().unfold(0, 2, 1).T)[0, 1])) < 0.02
    assert float((grid.mean(0) - 0.5).abs().max()) < 0.1


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(2, 50)
    logits[0, [7, 31]] = 1.0
    assert sample(logits, _draws(2, temperature=0.0)) == [7, 0]


def test_frequencies_follow_the_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 6)
    tokens = sample(logits.expand(20_000, 6), _draws(20_000, temperature=0.7))
    found = torch.bincount(torch.tensor(tokens), minlength=6) / 20_000
    torch.testing.assert_close(found, torch.softmax(logits[0] / 0.7, -1), atol=0.012, rtol=0)


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    many = logits.expand(2000, 4)
    assert set(sample(many, _draws(2000, top_k=2))) == {0, 1}
    assert set(sample(many, _draws(2000, top_p=0.7))) == {0, 1}
    assert set(sample(many, _draws(2000, top_p=0.81))) == {0, 1, 2}
    assert set(sample(many, _draws(2000, top_p=1e-9))) == {0}
    assert set(sample(many, _draws(2000, top_k=3, top_p=0.6))) == {0, 1}
    assert set(sample(many, _draws(2000, temperature=1e-9))) == {0}


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((500, 9), -torch.inf)
    logits[:, 4] = 1.0
    assert set(sample(logits, _draws(500, temperature=100.0))) == {4}


sampling = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
)


@given(
    st.lists(st.tuples(sampling, st.integers(0, 2**63 - 1), st.integers(0, 4000)), min_size=1, max_size=9),
    st.integers(0, 1000), st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_row_does_not_depend_on_the_others(
    rows: list[tuple[Sampling, int, int]], seed: int, dtype: torch.dtype
) -> None:
    logits = (torch.randn(len(rows), 64, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    draws = [Draw(*row) for row in rows]
    together = sample(logits, draws)
    assert together == [sample(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]
    assert sample(logits.flip(0), draws[::-1]) == together[::-1]
