"""Analyses of attention and caches, as arrays and figures, after the papers' own figures. One file per question."""
