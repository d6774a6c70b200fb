"""What attention and caches look like inside, as arrays and as pictures, after the papers' own figures. One file a question."""
