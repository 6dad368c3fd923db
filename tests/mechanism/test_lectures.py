"""Worked examples from the lectures, computed by hand."""

import math

import pytest
import torch
from torch import Tensor

import regard


@pytest.fixture(params=["reference", "tiled"])
def implementation(request) -> str:
    return request.param


def rows(*numbers: tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def by_hand(scores: list[float], values: list[list[float]]) -> list[float]:
    """Return the softmax of the scores, and the weighted sum of the values."""
    powers = [math.exp(score) for score in scores]
    weights = [power / sum(powers) for power in powers]
    return [sum(weight * value[i] for weight, value in zip(weights, values, strict=True)) for i in range(3)]


class TestSelfAttention:
    """Three inputs with four features, projected to queries, keys and values with three features."""

    inputs = rows((1, 0, 1, 0), (0, 2, 0, 2), (1, 1, 1, 1))
    key_weights = rows((0, 0, 1), (1, 1, 0), (0, 1, 0), (1, 1, 0))
    query_weights = rows((1, 0, 1), (1, 0, 0), (0, 0, 1), (0, 1, 1))
    value_weights = rows((0, 2, 0), (0, 3, 0), (1, 0, 3), (1, 1, 0))

    @property
    def query_key_value(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.inputs @ self.query_weights,
            self.inputs @ self.key_weights,
            self.inputs @ self.value_weights,
        )

    def test_queries_keys_and_values(self):
        query, key, value = self.query_key_value
        assert query.tolist() == [[1, 0, 2], [2, 2, 2], [2, 1, 3]]
        assert key.tolist() == [[0, 1, 1], [4, 4, 0], [2, 3, 1]]
        assert value.tolist() == [[1, 2, 3], [2, 8, 0], [2, 6, 3]]

    def test_the_first_querys_scores_are_2_4_4(self, implementation):
        _, weights = regard.attend(*self.query_key_value, score=regard.Dot(), implementation=implementation)
        assert weights.scores()[0].tolist() == [2, 4, 4]
        assert weights.scores().tolist() == [[2, 4, 4], [4, 16, 12], [4, 12, 10]]

    def test_the_first_output(self, implementation):
        output, weights = regard.attend(
            *self.query_key_value, score=regard.Dot(), implementation=implementation
        )
        # exp 2 : exp 4 : exp 4, i.e. 1 : e² : e²
        total = 1 + 2 * math.exp(2)
        shares = [1 / total, math.exp(2) / total, math.exp(2) / total]
        assert weights[0].tolist() == pytest.approx(shares, abs=1e-14)
        assert shares == pytest.approx([0.06, 0.47, 0.47], abs=0.005)
        assert output[0].tolist() == pytest.approx(
            by_hand([2, 4, 4], [[1, 2, 3], [2, 8, 0], [2, 6, 3]]), abs=1e-13
        )
        assert output[0].tolist() == pytest.approx([1.9366, 6.6831, 1.5951], abs=5e-5)

    def test_all_outputs(self, implementation):
        output = regard.attention(*self.query_key_value, score=regard.Dot(), implementation=implementation)
        scores, values = [[2, 4, 4], [4, 16, 12], [4, 12, 10]], self.query_key_value[2].tolist()
        for actual, row in zip(output.tolist(), scores, strict=True):
            assert actual == pytest.approx(by_hand(row, values), abs=1e-13)


class TestDictionary:
    """A dictionary is attention: the query is compared with all keys; the best key's value is returned."""

    entries = {  # noqa: RUF012
        "First name": "Ada",
        "Last name": "Lovelace",
        "Date of birth": "May 5th 2000",
        "Place of birth": "London",
    }

    @property
    def keys(self) -> Tensor:
        return torch.eye(len(self.entries), dtype=torch.float64)

    def encode(self, word: str) -> Tensor:
        """Return one-hot rows for keys, zeros for anything else."""
        words = list(self.entries)
        return self.keys[[words.index(word)]] if word in words else torch.zeros_like(self.keys[:1])

    def text(self) -> Tensor:
        """Decode the stored values, letter by letter."""
        longest = max(map(len, self.entries.values()))
        return torch.tensor(
            [list(map(ord, value.ljust(longest))) for value in self.entries.values()]
        ).double()

    def look_up(self, word: str, **options: object) -> str:
        output = regard.attention(self.encode(word), self.keys, self.text(), **options)
        return "".join(chr(round(letter)) for letter in output[0].tolist()).rstrip()

    def test_the_date_of_birth(self, implementation):
        actual = self.look_up("Date of birth", normalize=regard.Hard(), implementation=implementation)
        assert actual == "May 5th 2000"

    def test_every_key_returns_its_value(self, implementation):
        for word, value in self.entries.items():
            assert self.look_up(word, normalize=regard.Hard(), implementation=implementation) == value

    def test_the_lookup_is_exact(self, implementation):
        output = regard.attention(
            self.keys, self.keys, self.text(), normalize=regard.Hard(), implementation=implementation
        )
        assert torch.equal(output, self.text())

    def test_an_unknown_query_matches_all_keys_equally(self, implementation):
        output = regard.attention(
            self.encode("Shoe size"),
            self.keys,
            self.text(),
            normalize=regard.Hard(),
            implementation=implementation,
        )
        torch.testing.assert_close(output, self.text().mean(0, keepdim=True))

    def test_softmax_at_low_temperature_tends_to_it(self, implementation):
        gaps = []
        for temperature in (1.0, 0.3, 0.1, 0.03, 0.01):
            output = regard.attention(
                self.keys,
                self.keys,
                self.text(),
                score=regard.Dot(),
                normalize=regard.Softmax(temperature=temperature),
                implementation=implementation,
            )
            gaps.append((output - self.text()).abs().max().item())
        assert gaps == sorted(gaps, reverse=True)
        assert gaps[0] > 1
        assert gaps[-1] < 1e-12
        actual = self.look_up(
            "Date of birth",
            score=regard.Dot(),
            normalize=regard.Softmax(temperature=0.05),
            implementation=implementation,
        )
        assert actual == "May 5th 2000"


class TestThreeByThree:
    query = rows((0.3, 1.2, 2.2), (0.1, 6.2, 2.1), (2.1, 2.5, 5.2))
    key = rows((0.4, 1.4, 0), (0.2, -1.1, 0), (0.3, 1.2, 4))
    value = rows((2.3, 1.1, 3.5), (3, 1, 0.5), (-2.2, 4.1, 2.5))
    scores = (
        (0.12 + 1.68, 0.06 - 1.32, 0.09 + 1.44 + 8.8),
        (0.04 + 8.68, 0.02 - 6.82, 0.03 + 7.44 + 8.4),
        (0.84 + 3.5, 0.42 - 2.75, 0.63 + 3.0 + 20.8),
    )

    def test_scores(self, implementation):
        _, weights = regard.attend(
            self.query, self.key, self.value, score=regard.Dot(), implementation=implementation
        )
        torch.testing.assert_close(weights.scores(), rows(*self.scores))

    @pytest.mark.parametrize("scale", [1.0, 1 / math.sqrt(3)], ids=["plain", "scaled"])
    def test_output(self, implementation, scale):
        output = regard.attention(
            self.query, self.key, self.value, score=regard.ScaledDot(scale), implementation=implementation
        )
        for actual, row in zip(output.tolist(), self.scores, strict=True):
            wanted = by_hand([scale * score for score in row], self.value.tolist())
            assert actual == pytest.approx(wanted, abs=1e-12)

    def test_the_default_scale_is_one_over_the_root_of_the_width(self, implementation):
        torch.testing.assert_close(
            regard.attention(self.query, self.key, self.value, implementation=implementation),
            regard.attention(
                *(self.query, self.key, self.value),
                score=regard.ScaledDot(1 / math.sqrt(3)),
                implementation=implementation,
            ),
        )

    def test_the_column_notation_is_the_transpose_of_ours(self, implementation):
        # Some texts put tokens in columns: Q, K, V are (features × tokens), Output = V · softmax(QᵀK)ᵀ
        q, k, v = self.query.mT, self.key.mT, self.value.mT
        in_columns = v @ torch.softmax(q.mT @ k, -1).mT
        ours = regard.attention(
            self.query, self.key, self.value, score=regard.Dot(), implementation=implementation
        )
        torch.testing.assert_close(in_columns, ours.mT)
        assert not torch.allclose(in_columns, ours)
