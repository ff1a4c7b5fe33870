"""Two of a kind beside each other: releases, records, and a case with what it was before; and one curve by itself."""
