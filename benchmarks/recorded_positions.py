"""N_max of recorded attention kernels with several query positions over cached tokens: python benchmarks/recorded_positions.py.

One line for each GPU, release, table and kernel: curves, and the median boundary at short and at long contexts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import median

from pytest_nfp.principle import find_boundary
from pytest_nfp.recordings import NoRecording, positions, tables

SHORT = 4096


def main() -> None:
    left_out: Counter[str] = Counter()
    print(f"{'':<88} {'curves':>6}  {'L <= 4096':>15}  {'L > 4096':>15}")
    print(f"{'GPU, release, table, kernel':<88} {'':>6}  {'n_max / exit':>15}  {'n_max / exit':>15}")
    for gpu in sorted(tables.SYSTEMS):
        try:
            found = positions.read(gpu)
        except NoRecording as reason:
            print(f"{gpu}: {reason}")
            continue
        left_out.update(found.left_out)
        groups = defaultdict(list)
        for c in found.curves:
            groups[f"{gpu} {c.framework} {c.release} {c.table} {c.kernel}"].append(c)
        for name, curves in sorted(groups.items()):
            shown = []
            for side in ([c for c in curves if c.context <= SHORT], [c for c in curves if c.context > SHORT]):
                both = [find_boundary(c.points) for c in side]
                text = f"{median(b.n_max for b in both):g} / {median(b.n_first_exit for b in both):g}" if both else ""
                shown.append(text)
            print(f"{name[:88]:<88} {len(curves):>6}  {shown[0]:>15}  {shown[1]:>15}")
    print("left out, tables or curves:")
    for reason, count in sorted(left_out.items()):
        print(f"  {count:>6}  {reason}")


if __name__ == "__main__":
    main()
