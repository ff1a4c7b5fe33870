"""The evaluator for C++ rules, on small rules of the kernels' own shape."""

from __future__ import annotations

import pytest

from pytest_nfp.granularity.cpp import call_function, local_constant
from pytest_nfp.granularity.maps import RuleUnknown

SELECT = """
inline uint32_t PickTile(int64_t rows, uint32_t head_dim) {
  // a comment
  if (rows > 64 && head_dim < 256) {
    return 128;
  } else {
    auto cc = Capability();
    if (cc.first >= 8) {
      const int limit = head_dim == 512 ? 8 : 0x10;
      if (!(rows <= limit)) { return 64; }
      return 16;
    }
    return 64;
  }
}
template <typename T, int Headdim>
void launch(Params &p) {
  constexpr static int kBlockM = Headdim <= 64 ? 192 : 2 * 32 + 64;
  while (true) {}
}
int loops(int n) { while (n) { n = n - 1; } return n; }
int falls(int n) { if (n > 1) return 1; }
"""


@pytest.mark.parametrize(
    ("rows", "head_dim", "major", "tile"),
    [
        (1, 128, 9, 16),
        (16, 128, 9, 16),
        (17, 128, 9, 64),
        (65, 128, 9, 128),
        (65, 256, 9, 64),
        (9, 512, 9, 64),
        (1, 128, 7, 64),
    ],
)
def test_branches_members_and_calls(rows: int, head_dim: int, major: int, tile: int) -> None:
    """if/else, logic, the conditional operator, hexadecimal, a call with members."""
    found = call_function(
        SELECT, "PickTile", {"rows": rows, "head_dim": head_dim}, {"Capability": lambda: {"first": major, "second": 0}}
    )
    assert found == tile


def test_a_local_constant_is_evaluated_alone() -> None:
    """The rest of the function may be anything."""
    assert local_constant(SELECT, "launch", "kBlockM", {"Headdim": 64}) == 192
    assert local_constant(SELECT, "launch", "kBlockM", {"Headdim": 128}) == 128


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("nowhere", {}, "no function nowhere"),
        ("PickTile", {"rows": 1}, "parameters that are not known here: head_dim"),
        ("PickTile", {"rows": 1, "head_dim": 1}, "call_expression is not evaluated"),
        ("loops", {"n": 1}, "while_statement is not evaluated"),
        ("falls", {"n": 1}, "ends without a return"),
    ],
)
def test_what_it_does_not_know_is_unknown(name: str, arguments: dict[str, int], reason: str) -> None:
    """Never a guess."""
    with pytest.raises(RuleUnknown, match=reason):
        call_function(SELECT, name, arguments, {})
