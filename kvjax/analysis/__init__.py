"""The papers' analyses: what attention and caches look like inside, as arrays and as pictures. One file a question."""
