"""Which walls hold each way out of the evaluator alone, all others switched off: python -m benchmarks.escapes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.granularity.escapes import ESCAPES, WALLS, attempt


def main() -> None:
    held = alone = 0
    print(f"{'way out':<40} {'held':<5} walls that hold it alone")
    with tempfile.TemporaryDirectory(prefix="nfp-escapes-") as folder:
        number = 0

        def works(*off: str) -> bool:
            nonlocal number
            number += 1
            return attempt(escape, Path(folder) / str(number), off)

        for escape in ESCAPES:
            if not works(*WALLS):
                print(f"{escape.name:<40} {'-':<5} this machine refuses it to everybody")
                continue
            is_held = not works()
            walls = [w for w in WALLS if not works(*(o for o in WALLS if o != w))]
            held += is_held
            alone += len(walls) == 1
            print(f"{escape.name:<40} {'yes' if is_held else 'NO':<5} {', '.join(walls)}", flush=True)
    print(f"{held} of {len(ESCAPES)} are held; {alone} rest on a single wall")


if __name__ == "__main__":
    main()
