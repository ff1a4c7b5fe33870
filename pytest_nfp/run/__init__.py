"""One run: which cases, what each of them stands on, its three questions, and what came out."""
